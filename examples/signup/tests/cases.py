"""The site's own tests, run by Django: `python -m examples.signup.manage test examples.signup.tests.cases`."""

from unittest import mock

import httpx2
from django.contrib.auth.hashers import check_password
from django.db import connection
from django.test import TestCase, TransactionTestCase

from examples.signup.jobs import app
from examples.signup.models import Step, User, Workspace
from tallybook.testing import assert_enqueued, assert_not_enqueued, drain

SECRET = "a long secret"


class SignUpTest(TestCase):
    def test_both_ways_to_sign_up_enqueue(self) -> None:
        for page in ("/sign-up/", "/sign-up/orm/"):
            email = f"{len(page)}@example.org"
            self.assertEqual(self.client.post(page, {"email": email, "password": SECRET}).status_code, 201)
            assert_enqueued("default", "check_address", user_id=User.objects.get(email=email).id)

    def test_a_password_is_kept_as_a_hash_alone(self) -> None:
        for page, made_by in (("/sign-up/", "pbkdf2_sha256$"), ("/sign-up/orm/", "scrypt$")):
            email = f"{len(page)}@example.org"
            self.client.post(page, {"email": email, "password": SECRET})
            kept = User.objects.get(email=email).password
            self.assertTrue(kept.startswith(made_by))  # sign-up by SQL hashes in the database
            self.assertTrue(check_password(SECRET, kept) and not check_password("another secret", kept))
        with connection.cursor() as cursor:
            cursor.execute(
                "select string_agg(j::text, '') || (select string_agg(u::text, '') from signup_user u)"
                " from tallybook.job j"
            )
            self.assertNotIn(SECRET, cursor.fetchone()[0])

    def test_the_database_hashes_each_password_as_django_does(self) -> None:
        with connection.cursor() as cursor:
            for password in ("", "short", "naïve ☃", "64" * 32, "longer than a block of SHA-256 " * 5):
                cursor.execute("select signup_hash(%s), signup_hash(%s)", [password, password])
                one, other = cursor.fetchone()
                self.assertEqual(len({one, other}), 2)  # each has a salt of its own
                self.assertTrue(check_password(password, one) and not check_password(password + " ", one))

    def test_no_statement_has_the_text_of_a_password(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute("select current_query(), %s::text", [SECRET])
            statement, sent = cursor.fetchone()
        self.assertEqual(sent, SECRET)
        self.assertNotIn(SECRET, statement)

    def test_what_is_no_sign_up_is_refused(self) -> None:
        wrong = (
            {},
            {"email": "a@example.org"},
            {"email": "a", "password": SECRET},
            {"email": "a@example.org", "password": "short"},
        )
        for page in ("/sign-up/", "/sign-up/orm/"):
            self.assertEqual([self.client.post(page, form).status_code for form in wrong], [422] * 4)
        self.assertFalse(User.objects.exists())

    def test_who_signs_up_twice_is_there_once(self) -> None:
        for page in ("/sign-up/", "/sign-up/orm/"):
            form = {"email": f"{len(page)}@example.org", "password": SECRET}
            codes = [self.client.post(page, form).status_code for _ in range(2)]
            self.assertEqual(codes, [201, 409])
        with connection.cursor() as cursor:
            cursor.execute("select count(*) from tallybook.job")
            self.assertEqual(cursor.fetchone(), (2,))

    def test_only_who_was_sent_brings_thanks(self) -> None:
        self.client.post("/sign-up/", {"email": "a@example.org", "password": SECRET})
        assert_not_enqueued("default", "thank_referrer")
        self.client.post("/sign-up/", {"email": "b@example.org", "password": SECRET, "referrer": "a@example.org"})
        assert_enqueued("default", "thank_referrer", user_id=User.objects.get(email="b@example.org").id)


class PipelineTest(TransactionTestCase):
    def setUp(self) -> None:
        self.client.post("/sign-up/", {"email": "ada@example.org", "password": SECRET, "referrer": "bob@example.org"})

    def tearDown(self) -> None:
        for queue in ("default", "mail"):  # Django empties its own tables only
            app.queues.truncate(queue).sync("default")

    def steps(self) -> list[str]:
        return list(Step.objects.order_by("id").values_list("name", flat=True))

    def post(self, *answers: int) -> mock.Mock:
        patched = mock.patch("httpx2.post", side_effect=[_answer(status) for status in answers])
        self.addCleanup(patched.stop)
        return patched.start()

    def test_each_step_brings_the_next_and_unknown_ones_are_shown(self) -> None:
        post = self.post(202)
        report = drain(app)
        self.assertEqual((report.completed, report.dead, report.moved), (3, 0, 1))
        self.assertEqual(self.steps(), ["check_address", "make_workspace", "send_welcome"])
        self.assertEqual(Workspace.objects.count(), 1)
        key = post.call_args.kwargs["headers"]["Idempotency-Key"]
        self.assertEqual(key, str(Step.objects.get(name="send_welcome").job_id))
        page = self.client.get("/").content.decode()
        self.assertInHTML("<li><code>thank_referrer</code>: 1 waiting</li>", page)

    def test_a_refused_address_is_noted_with_the_end_of_its_job(self) -> None:
        self.post(422)
        self.assertEqual(drain(app).dead, 1)
        self.assertTrue(User.objects.get().bounced)
        self.assertNotIn("send_welcome", self.steps())

    def test_an_overloaded_provider_is_asked_again_and_nothing_is_written_until_then(self) -> None:
        post = self.post(503)
        self.assertEqual(drain(app).retrying, 1)
        self.assertEqual((post.call_count, self.steps()), (1, ["check_address", "make_workspace"]))


def _answer(status: int) -> httpx2.Response:
    return httpx2.Response(status, request=httpx2.Request("POST", "http://mail"))
