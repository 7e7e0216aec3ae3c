"""More tests of the project in docs/django.md, run by Django's own runner from test_django.py in the app shop."""

import json
import logging
from datetime import timedelta
from io import StringIO
from unittest import mock

from asgiref.sync import async_to_sync
from django.core.management import call_command
from django.db import connection, connections, transaction
from django.test import TransactionTestCase, override_settings
from django.utils import timezone
from django_tasks import TaskResultStatus, default_task_backend
from django_tasks.exceptions import InvalidTaskError, TaskResultDoesNotExist, TaskResultMismatch
from django_tasks.signals import task_enqueued, task_finished, task_started
from shop import more_jobs
from shop.jobs import app, bill
from shop.models import Order
from shop.tasks import add, refuse

import tallybook
from tallybook.contrib.django.worker import app as served
from tallybook.testing import drain, travel

logging.getLogger("django_tasks").setLevel(logging.CRITICAL)
logging.getLogger("tallybook").setLevel(logging.CRITICAL)


class Clean(TransactionTestCase):
    def setUp(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute("delete from tallybook.entry; delete from tallybook.scheduled; delete from tallybook.dead")
        self.told: list[tuple[str, str]] = []
        for name, signal in (("enqueued", task_enqueued), ("started", task_started), ("finished", task_finished)):

            def receive(sender, task_result, name=name, **_):
                self.told.append((name, task_result.status))

            signal.connect(receive)
            self.addCleanup(signal.disconnect, receive)

    def job(self, result) -> dict:
        with connection.cursor() as cursor:
            cursor.execute("select to_jsonb(j)::text from tallybook.job j where id = %s", [int(result.id)])
            return json.loads(cursor.fetchone()[0])


class TasksTest(Clean):
    databases = {"default", "other"}  # noqa: RUF012

    def test_a_task_is_enqueued_with_its_transaction_and_its_result_is_read(self) -> None:
        with self.assertRaises(KeyError), transaction.atomic():
            lost = add.enqueue(1)
            raise KeyError
        with self.assertRaises(TaskResultDoesNotExist):
            default_task_backend.get_result(lost.id)
        with transaction.atomic():
            result = add.using(priority=-100).enqueue(1, b=2)
            connections["other"].ensure_connection()
            with connections["other"].cursor() as cursor:
                cursor.execute("select count(*) from tallybook.job")
                self.assertEqual(cursor.fetchone(), (0,))
        job = self.job(result)
        self.assertEqual((job["task"], job["args"], job["queue"]), ("shop.tasks.add", {"a": 1, "b": 2}, "mail"))
        self.assertEqual((job["priority"], self.job(add.enqueue(5))["priority"]), (200, 90))
        result.refresh()
        self.assertEqual((result.status, result.worker_ids), (TaskResultStatus.READY, []))
        self.assertEqual(drain(served).completed, 2)
        found = add.get_result(result.id)
        self.assertEqual((found.status, found.return_value), (TaskResultStatus.SUCCESSFUL, 3))
        self.assertEqual((found.args, found.kwargs, found.attempts), ([1], {"b": 2}, 1))
        self.assertEqual((found.task.priority, found.task.queue_name, found.backend), (-100, "mail", "default"))
        instants = [found.enqueued_at, found.started_at, found.last_attempted_at, found.finished_at]
        self.assertEqual(instants, sorted(instants))
        self.assertEqual(
            self.told,
            [("enqueued", "READY")] * 3 + [("started", "RUNNING"), ("finished", "SUCCESSFUL")] * 2,
        )

    def test_a_failure_is_an_error_of_the_result(self) -> None:
        result = async_to_sync(refuse.aenqueue)("nobody home")
        drain(served)
        found = async_to_sync(refuse.aget_result)(result.id)
        self.assertEqual((found.status, len(found.errors), found.attempts), (TaskResultStatus.FAILED, 1, 1))
        self.assertIs(found.errors[0].exception_class, LookupError)
        self.assertIn("attempt 1: nobody home", found.errors[0].traceback)
        with self.assertRaisesMessage(ValueError, "Task failed"):
            _ = found.return_value
        self.assertEqual(self.told[1:], [("started", "RUNNING"), ("finished", "FAILED")])

    def test_until_its_last_attempt_a_task_is_ready_again(self) -> None:
        result = more_jobs.flaky.enqueue([1, 2])
        drain(served)
        result.refresh()
        self.assertEqual((result.status, len(result.errors)), (TaskResultStatus.READY, 1))
        self.assertEqual(self.told, [("enqueued", "READY"), ("started", "RUNNING")])
        travel(app.conninfo(), timedelta(days=1))
        drain(served)
        result.refresh()
        self.assertEqual((result.status, len(result.errors), result.attempts), (TaskResultStatus.FAILED, 2, 2))
        self.assertEqual(self.told[2:], [("started", "RUNNING"), ("finished", "FAILED")])

    def test_the_last_attempt_may_be_the_queues(self) -> None:
        """Of a task without a limit of its own: receivers hear of the end after the queue's number of failures."""
        with connection.cursor() as cursor:
            cursor.execute("select tallybook.queue_set('default', max_attempts => 2)")
        for task in (more_jobs.failing, more_jobs.afailing):
            self.told.clear()
            result = task.enqueue()
            drain(served)
            self.assertEqual(self.told, [("enqueued", "READY"), ("started", "RUNNING")])
            travel(app.conninfo(), timedelta(days=1))
            self.assertEqual(drain(served).dead, 1)
            result.refresh()
            self.assertEqual(result.status, TaskResultStatus.FAILED)
            self.assertEqual(self.told[2:], [("started", "RUNNING"), ("finished", "FAILED")])

    def test_a_handler_that_breaks_its_connection_fails_with_its_own_error(self) -> None:
        """The queue's number of failures cannot be read then, and the error on record is the handler's."""
        result = more_jobs.breaking.enqueue()
        drain(served)
        self.assertEqual(
            [error.exception_class for error in default_task_backend.get_result(result.id).errors],
            [ConnectionResetError],
        )

    def test_run_after_is_not_before(self) -> None:
        result = add.using(run_after=timezone.now() + timedelta(hours=1)).enqueue(1)
        self.assertEqual((self.job(result)["state"], drain(served).completed), ("scheduled", 0))
        travel(app.conninfo(), timedelta(hours=2))
        self.assertEqual(drain(served).completed, 1)

    def test_args_of_every_kind_come_back(self) -> None:
        result = more_jobs.everything.enqueue(1, 2, 3, 4, key=5, more={"x": [b"6", (7,)]})
        self.assertEqual(
            self.job(result)["args"], {"a": 1, "b": 2, "rest": [3, 4], "key": 5, "more": {"x": ["6", [7]]}}
        )
        drain(served)
        result.refresh()
        self.assertEqual(result.return_value, [1, 2, [3, 4], 5, {"more": {"x": ["6", [7]]}}])
        found = default_task_backend.get_result(result.id)
        self.assertEqual((found.args, found.kwargs), ([1, 2, 3, 4], {"key": 5, "more": {"x": ["6", [7]]}}))

    def test_sql_puts_tasks_in(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                """select tallybook.enqueue('mail', 'shop.tasks.add', '{"a": 20, "b": 22}', priority => 500)"""
            )
            number = cursor.fetchone()[0]
        drain(served)
        found = default_task_backend.get_result(str(number))
        self.assertEqual((found.return_value, found.kwargs), (42, {"a": 20, "b": 22}))

    def test_what_cannot_be_is_refused_and_the_transaction_goes_on(self) -> None:
        with transaction.atomic():
            for wrong in ("", "x", "-1", "999", str(2**70), str(bill.enqueue_sync("default", 1).id)):
                with self.assertRaises(TaskResultDoesNotExist):
                    default_task_backend.get_result(wrong)
            with self.assertRaises(TypeError):
                add.enqueue()
            with self.assertRaises(TypeError):
                add.enqueue(object())
            with self.assertRaises(InvalidTaskError):
                add.using(queue_name="nowhere")
            with self.assertRaises(TaskResultMismatch):
                refuse.get_result(add.enqueue(1).id)
            Order.objects.create(email="ada@example.org")
        self.assertEqual(Order.objects.count(), 1)

    def test_a_name_in_a_row_is_no_code(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute("select tallybook.enqueue('mail', 'os.system', '{\"command\": \"true\"}')")
            number = cursor.fetchone()[0]
            cursor.execute("select tallybook.enqueue('mail', 'shop.tasks.add.func', '{}')")
        with self.assertRaises(TaskResultDoesNotExist):
            default_task_backend.get_result(str(number))
        self.assertEqual(drain(served).completed, 0)

    @override_settings(USE_TZ=False)
    def test_without_time_zones_instants_are_naive(self) -> None:
        result = add.using(run_after=timezone.now() + timedelta(hours=1)).enqueue(1)
        result.refresh()
        self.assertIsNone(result.enqueued_at.tzinfo)
        self.assertLess(abs(result.enqueued_at - timezone.now()), timedelta(minutes=5))
        with connection.cursor() as cursor:
            cursor.execute("select (run_at - enqueued_at)::text from tallybook.job where id = %s", [int(result.id)])
            self.assertTrue(cursor.fetchone()[0].startswith(("00:59:5", "01:00:0")))


class ConnectionsTest(Clean):
    def test_old_connections_are_closed_around_jobs(self) -> None:
        """A job that breaks its thread's connection, or the ORM's, does not harm the next one."""
        for spoil, count in ((more_jobs.spoil, more_jobs.count), (more_jobs.aspoil, more_jobs.acount)):
            spoil.enqueue_sync("default")
            count.enqueue_sync("default")
            report = drain(app, queues={"default": 1})
            self.assertEqual((report.completed, report.dead), (2, 0), spoil.name)

    def test_an_async_job_waits_for_no_orm_call_of_another_job(self) -> None:
        """Two jobs meet, each in a call through sync_to_async: each has its own thread."""
        for _ in range(2):
            more_jobs.ameet.enqueue_sync("default")
        self.assertEqual(drain(app, queues={"default": 2}).completed, 2)

    def test_async_jobs_use_the_session_and_the_thread_of_the_job_before(self) -> None:
        """The tenth finds hardly more sessions and threads than the first."""
        for _ in range(10):
            more_jobs.acount_open.enqueue_sync("default")
        self.assertEqual(drain(app, queues={"default": 1}).completed, 10)
        with connection.cursor() as cursor:
            cursor.execute("select max(result::int) - min(result::int) from tallybook.job where task = 'acount_open'")
            self.assertLess(cursor.fetchone()[0], 5)  # sessions of the worker itself

    def test_without_the_hooks_the_next_job_would_fail(self) -> None:
        """The negative control: an App that does not know Django runs into the broken connection."""
        plain = tallybook.App("plain", dsn=app.conninfo())
        plain.include(more_jobs.spoil, more_jobs.count)
        more_jobs.spoil.enqueue_sync("default")
        more_jobs.count.enqueue_sync("default")
        report = drain(plain, queues={"default": 1})
        self.assertEqual((report.completed, report.dead), (1, 1))

    def test_commands_run_in_this_process(self) -> None:
        with mock.patch.dict("os.environ"):
            call_command("tallybook", "doctor", "--info", "--json", stdout=(out := StringIO()))
        self.assertTrue(json.loads(out.getvalue())["database"].startswith("test_"))
        with mock.patch.dict("os.environ"), self.assertRaisesMessage(Exception, "tallybook nothing has failed"):
            call_command("tallybook", "nothing", stderr=StringIO())
