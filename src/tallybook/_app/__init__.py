"""What a program holds: the App, and behind its nouns the verbs that operators, pages and scripts say."""

from tallybook._app.app import App
from tallybook._task import Task

__all__ = ["App", "Task"]
