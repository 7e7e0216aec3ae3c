"""Integrations: django, fastapi, flask, sentry, sqlalchemy.

Each needs the extra of its name; nothing else imports it.
"""
