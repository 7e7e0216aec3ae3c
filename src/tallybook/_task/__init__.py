"""A task: a function that stays one, and the verbs that make jobs and subjects of it."""

from tallybook._task.task import BoundTask, Task

__all__ = ["BoundTask", "Task"]
