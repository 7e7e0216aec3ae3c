"""At home in frameworks: django, fastapi, flask, sqlalchemy. Each needs the extra of its name, and nobody else here imports it."""
