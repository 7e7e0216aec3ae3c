"""What a program holds: the App, and behind its nouns the verbs that operators, pages and scripts say."""

from tallybook._app.app import App, ContextTask, Task

__all__ = ["App", "ContextTask", "Task"]
