"""The dashboard and the operator API: ASGI apps over an App. What is public is in tallybook.web."""
