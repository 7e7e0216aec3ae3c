"""Tests of the admin in the project of docs/django.md, run by Django's own runner from test_django.py."""

import json
from io import StringIO

from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.db import connection
from django.test import SimpleTestCase
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from shop.jobs import app, bill
from shop.tasks import refuse

from tallybook.contrib.django.models import Job
from tallybook.contrib.django.worker import app as served
from tallybook.testing import drain

MODELS = ("job", "deadletter", "queue", "schedule")
CHOSEN = "_selected_action"


def ask(query: str, *values: object) -> list[tuple]:
    with connection.cursor() as cursor:
        cursor.execute(query, values)
        return cursor.fetchall()


def pages(model: str) -> str:
    return reverse(f"admin:tallybook_{model}_changelist")


class AdminTest(SimpleTestCase):
    """Commits, because jobs must run, and deletes only what it must: emptying all tables after each test is slow."""

    databases = {"default"}  # noqa: RUF012

    def setUp(self) -> None:
        User.objects.all().delete()
        ask(
            "with e as (delete from tallybook.entry), s as (delete from tallybook.scheduled),"
            " d as (delete from tallybook.dead), f as (delete from tallybook.schedule)"
            " delete from tallybook.audit returning 1"
        )
        self.boss = User.objects.create_superuser("ada")
        self.client.force_login(self.boss)

    def person(self, name: str, *may: str) -> None:
        """Log in a member of staff with these permissions."""
        found = User.objects.create_user(name, is_staff=True)
        found.user_permissions.set(Permission.objects.filter(content_type__app_label="tallybook", codename__in=may))
        self.assertEqual(found.user_permissions.count(), len(may))
        self.client.force_login(found)

    def act(self, model: str, action: str, *chosen: object, **more: str) -> str:
        """Choose rows of a list and an action; return the next page."""
        said = {"action": action, CHOSEN: [str(one) for one in chosen], "index": "0", **more}
        return self.client.post(pages(model), said, follow=True).content.decode()

    def confirm(self, model: str, action: str, *chosen: object) -> str:
        said = {"action": action, CHOSEN: [str(one) for one in chosen], "confirmed": "yes"}
        return self.client.post(pages(model), said, follow=True).content.decode()

    def text(self, address: str, code: int = 200) -> str:
        answer = self.client.get(address)
        self.assertEqual(answer.status_code, code, answer)
        return answer.content.decode()

    def dead(self, n: int = 1) -> list[int]:
        found = [int(refuse.enqueue("nobody home").id) for _ in range(n)]
        self.assertEqual(drain(served, queues=["default"]).dead, n)
        return found

    def audits(self) -> list[tuple]:
        found = ask("select actor, via, action, target::text, done::text from tallybook.audits order by id")
        return [(*one[:3], json.loads(one[3]), json.loads(one[4])) for one in found]

    def test_lists_cost_the_same_however_many_rows_there_are(self) -> None:
        """No page sends more queries for 60 rows than for 3, and none counts jobs."""
        cost: dict[str, list[int]] = {model: [] for model in MODELS}
        for n in (3, 57):
            self.dead(n)
            for number in range(n):
                name = f"q{n}-{number}"
                ask("select tallybook.enqueue(%s, 'bill', '{}')", name)
                ask("select tallybook.schedule_set(%s, 'bill', '{}', cron => '0 6 * * *')", name)
            for model in MODELS:
                with CaptureQueriesContext(connection) as seen:
                    self.text(pages(model))
                cost[model].append(len(seen))
                said = [one["sql"].lower() for one in seen.captured_queries]
                self.assertFalse([one for one in said if "count(*)" in one and '"tallybook"."job"' in one])
        for model, (few, many) in cost.items():
            self.assertEqual(few, many, model)
            self.assertLessEqual(many, 8, model)

    def test_jobs_are_found_and_paged(self) -> None:
        """Filters by state, queue and task, a search by id and by task, pages behind a cursor without a job twice."""
        ask("select tallybook.enqueue('mail', 'send_receipt', '{\"order_id\": 7}') from generate_series(1, 120)")
        (dead,) = self.dead()
        address, seen = pages("job"), []
        while address:
            answer = self.client.get(address)
            found = answer.context["cl"]
            seen += [job.pk for job in found.result_list]
            address = found.next_url and pages("job") + found.next_url
        self.assertEqual((len(seen), len(set(seen))), (121, 121))
        for query, n in (
            ("state=dead", 1), ("queue=mail&state=available", 50), ("task=shop.tasks.refuse", 1), (f"q={dead}", 1),
            ("q=shop.tasks.refuse", 1), ("q=nothing", 0), (f"q={2**70}", 0), ("queue=nowhere", 0),
        ):  # fmt: skip
            answer = self.client.get(f"{pages('job')}?{query}")
            self.assertEqual(len(answer.context["cl"].result_list), n, query)
        for wrong in ("state=lost", "p=wrong", "worker=1"):
            self.assertRedirects(self.client.get(f"{pages('job')}?{wrong}"), f"{pages('job')}?e=1")

    def test_the_page_of_a_job_shows_it_without_secrets(self) -> None:
        """Args are redacted and text stays text; errors and the reason are there; nothing can be edited."""
        args = json.dumps({"order_id": "<b>7</b>", "api_key": "hunter2"})
        ask("select tallybook.enqueue('mail', 'send_receipt', %s)", args)
        ((job,),) = ask("select id from tallybook.job")
        page = self.text(reverse("admin:tallybook_job_change", args=[job]))
        self.assertIn("&lt;b&gt;7&lt;/b&gt;", page)
        self.assertNotIn("hunter2", page)
        self.assertNotIn('name="_save"', page)
        (dead,) = self.dead()
        page = self.text(reverse("admin:tallybook_deadletter_change", args=[dead]))
        self.assertIn("attempt 1: nobody home", page)
        self.assertIn("Traceback", page)
        change = self.client.post(reverse("admin:tallybook_job_change", args=[job]), {"queue": "other", "_save": "1"})
        self.assertEqual(change.status_code, 403)
        with CaptureQueriesContext(connection) as seen:
            self.text(reverse("admin:tallybook_job_change", args=[dead]))
        self.assertEqual(len(seen), 4)

    def test_actions_on_jobs_are_verbs_with_a_row_in_the_audit(self) -> None:
        """Retry, cancel and drop: done by name, refused where they do not fit, audited only with an effect."""
        first, second = self.dead(2)
        job = bill.enqueue_sync("default", 1).id
        self.assertIn("1 job: retried", self.act("deadletter", "retry", first))
        self.assertIn("Not changed", self.act("job", "retry", job))
        self.assertIn("cannot be retried any more", self.act("deadletter", "drop", second))
        self.assertEqual(Job.objects.filter(state="dead").count(), 1)
        self.assertIn("1 job: dropped", self.confirm("deadletter", "drop", second))
        self.assertIn("None of them will start", self.act("job", "cancel", job))
        self.assertIn("1 job: cancelled", self.confirm("job", "cancel", job))
        self.assertIn("cancelled already", self.confirm("job", "cancel", job))
        self.assertIn("no job 999", self.confirm("job", "cancel", 999))
        self.assertEqual(app.jobs.state(job).sync("default"), "cancelled")
        self.assertEqual(
            self.audits(),
            [
                ("ada", "admin", "jobs.retry", {"jobs": [first]}, {"retried": 1}),
                ("ada", "admin", "jobs.drop", {"jobs": [second]}, {"dropped": 1}),
                ("ada", "admin", "jobs.cancel", {"jobs": [job]}, {"cancelled": 1}),
            ],
        )

    def test_actions_never_reach_what_is_not_chosen(self) -> None:
        """A form that requests all matching rows changes only the rows that it names."""
        first, second = self.dead(2)
        self.act("deadletter", "retry", first, select_across="1")
        self.assertEqual(app.jobs.state(second).sync("default"), "dead")

    def test_queues_are_paused_resumed_and_emptied(self) -> None:
        """Pause, resume, and empty after a question; a second pause changes nothing and is not audited."""
        jobs = [bill.enqueue_sync("default", n).id for n in range(3)]
        self.assertIn("Queue default paused", self.act("queue", "pause", "default"))
        self.assertIn("was paused already", self.act("queue", "pause", "default"))
        self.assertIn("default", self.text(pages("queue") + "?paused=yes"))
        self.assertIn("resumed", self.act("queue", "resume", "default"))
        self.assertIn("Running jobs continue", self.act("queue", "empty", "default"))
        self.assertIn("3 cancelled", self.confirm("queue", "empty", "default"))
        self.assertEqual({app.jobs.state(job).sync("default") for job in jobs}, {"cancelled"})
        self.assertIn("Nothing was changed", self.act("queue", "pause", "nowhere"))
        self.assertEqual([one[2] for one in self.audits()], ["queue.pause", "queue.resume", "queue.truncate"])
        self.assertIn("Retention class", self.text(reverse("admin:tallybook_queue_change", args=["default"])))

    def test_schedules_are_paused_resumed_and_run(self) -> None:
        """Pause, resume and run now; a run enqueues a job, and is skipped while that job has not ended."""
        ask(
            "select tallybook.schedule_set('daily', 'bill', '{\"order_id\": 1}', cron => '0 6 * * *',"
            " tz => 'Europe/Berlin')"
        )
        self.assertIn("0 6 * * * Europe/Berlin", self.text(pages("schedule")))
        self.assertIn("Schedule daily paused", self.act("schedule", "pause", "daily"))
        self.assertIn("Schedule daily resumed", self.act("schedule", "resume", "daily"))
        self.assertIn("enqueued, job", self.act("schedule", "run", "daily"))
        self.assertIn("skipped", self.act("schedule", "run", "daily"))
        self.assertEqual(Job.objects.filter(task="bill").count(), 1)
        self.assertIn("Europe/Berlin", self.text(reverse("admin:tallybook_schedule_change", args=["daily"])))
        actions = [one[2] for one in self.audits()]
        self.assertEqual(actions, ["schedule.pause", "schedule.resume", "schedule.run", "schedule.run"])

    def test_permissions_decide_who_looks_and_who_acts(self) -> None:
        """Staff without permissions see nothing; with view they look; with change they act; each by its model."""
        (dead,) = self.dead()
        self.person("nobody")
        self.assertNotIn("Tallybook", self.text(reverse("admin:index")))
        for model in MODELS:
            self.text(pages(model), 403)
        self.person("viewer", "view_job", "view_queue", "view_deadletter", "view_schedule")
        for model in MODELS:
            self.assertNotIn('name="action"', self.text(pages(model)))
        self.assertNotIn(
            "<button", self.text(reverse("admin:tallybook_deadletter_change", args=[dead])).split("content-main")[1]
        )
        self.act("deadletter", "retry", dead)
        self.act("queue", "pause", "default")
        self.person("fixer", "change_deadletter", "view_queue")
        self.act("queue", "pause", "default")
        self.text(pages("job"), 403)
        self.assertEqual(self.audits(), [])
        self.assertIn('value="retry"', self.text(reverse("admin:tallybook_deadletter_change", args=[dead])))
        self.assertIn("1 job: retried", self.act("deadletter", "retry", dead))
        self.assertEqual([one[0] for one in self.audits()], ["fixer"])

    def test_jobs_are_in_no_dump_of_the_projects_data(self) -> None:
        """`dumpdata` has no job in it and makes no query about them; `flush` leaves them alone."""
        bill.enqueue_sync("default", 1)
        with CaptureQueriesContext(connection) as seen:
            call_command("dumpdata", stdout=(out := StringIO()))
        self.assertIn("auth.user", out.getvalue())
        self.assertNotIn("tallybook.job", out.getvalue())
        self.assertFalse([one for one in seen.captured_queries if '"tallybook".' in one["sql"]])
        call_command("flush", interactive=False, verbosity=0)
        self.assertEqual(Job.objects.count(), 1)
