"""The dashboard, an ASGI app over an App. Its public names are in tallybook.web."""
