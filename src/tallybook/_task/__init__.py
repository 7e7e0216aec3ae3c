"""A task: a function that stays one, and the verbs that make jobs and subjects of it."""

from tallybook._task.task import AtomicContextTask, AtomicTask, BoundTask, ContextTask, Task

__all__ = ["AtomicContextTask", "AtomicTask", "BoundTask", "ContextTask", "Task"]
