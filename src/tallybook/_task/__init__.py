"""Task: a callable function, with the verbs that make jobs and subjects of it."""

from tallybook._task.task import BoundTask, Task

__all__ = ["BoundTask", "Task"]
