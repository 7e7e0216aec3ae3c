"""The App, and its nouns with the verbs for operators, pages and scripts."""

from tallybook._app.app import App, ContextTask, Task

__all__ = ["App", "ContextTask", "Task"]
