"""At home in frameworks: django, fastapi, flask, sqlalchemy. Each needs the extra of its name."""
