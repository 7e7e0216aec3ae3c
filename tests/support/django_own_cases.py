"""Django's own tests of `django.tasks` (tests/tasks of its source), run on our Backend in a project of test_django.py.

Tests are replaced if they name another backend, query a database in the thread of an event loop, or expect the same
instant from the caller's and the server's clock.
"""

import dataclasses

from django.tasks import task_backends
from django.tasks.exceptions import TaskResultDoesNotExist
from django.test import override_settings

from tallybook.contrib.django import Backend
from tasks import tasks, test_tasks


class Recorded(Backend):
    """Our backend, with the list that Django's tests read."""

    def __init__(self, alias, params):
        super().__init__(alias, params)
        self.results = []

    def enqueue(self, task, args, kwargs):
        self.results.append(super().enqueue(task, args, kwargs))
        return self.results[-1]

    def clear(self):
        self.results.clear()


OURS = {"BACKEND": "shop.test_more.Recorded"}


@override_settings(
    TASKS={
        "default": {**OURS, "QUEUES": ["default", "queue_1"]},
        "immediate": {"BACKEND": "django.tasks.backends.immediate.ImmediateBackend", "QUEUES": []},
        "missing": {"BACKEND": "does.not.exist"},
    }
)
class OnOurBackend(test_tasks.TaskTestCase):
    databases = {"default"}  # noqa: RUF012

    def same(self, one, other):
        near = one.enqueued_at - other.enqueued_at
        self.assertLess(abs(near.total_seconds()), 60)
        self.assertEqual(dataclasses.replace(one, enqueued_at=None), dataclasses.replace(other, enqueued_at=None))

    def test_using_correct_backend(self):
        self.assertIsInstance(task_backends["default"], Recorded)

    def test_get_backend(self):
        self.assertIsInstance(tasks.noop_task.get_backend(), Recorded)

    def test_get_result(self):
        result = tasks.noop_task.enqueue()
        self.same(result, tasks.noop_task.get_result(result.id))

    async def test_get_result_async(self):
        result = await tasks.noop_task.aenqueue()
        self.same(result, await tasks.noop_task.aget_result(result.id))

    async def test_get_missing_result(self):
        with self.assertRaises(TaskResultDoesNotExist):
            await tasks.noop_task.aget_result("123456")

    async def test_refresh_result(self):
        result = await tasks.noop_task.aenqueue()
        before = dataclasses.replace(result)
        await result.arefresh()
        self.same(result, before)
