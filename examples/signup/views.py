"""The page, and sign-up by SQL and by models."""

from django import forms
from django.contrib.auth.hashers import make_password
from django.db import IntegrityError, connection, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.views.decorators.http import require_POST

from examples.signup.jobs import check_address
from examples.signup.models import User

# One statement, one round trip: the user and the tasks are there together, or none of them is. No code of Tallybook's runs
# here, and nobody has implemented `thank_referrer` yet.
SIGN_UP = """\
with u as (
  insert into signup_user (email, password, referrer, checked, bounced) values (%s, %s, %s, false, false)
  on conflict (email) do nothing returning id, referrer
)
select tallybook.enqueue('default', 'check_address', jsonb_build_object('user_id', u.id)),
       case when u.referrer <> '' then tallybook.enqueue('default', 'thank_referrer', jsonb_build_object('user_id', u.id)) end
  from u"""

# The page of a small site: it reads all jobs there are. In a large one give jobs links, and ask for these (docs/sql.md).
USERS = """\
select u.email, u.bounced,
       (select json_agg(json_build_object('task', j.task, 'state', j.state, 'unserved', j.unserved, 'error', j.last_error)
                        order by j.id)
          from tallybook.job j where j.args = jsonb_build_object('user_id', u.id))
  from (select * from signup_user order by id desc limit 25) u order by u.id desc"""
TODO = "select task, count(*) from tallybook.job where unserved group by task order by task"


class SignUp(forms.Form):
    """What somebody sends who signs up."""

    email = forms.EmailField()
    password = forms.CharField(min_length=8, max_length=200, strip=False)
    referrer = forms.EmailField(required=False)

    def clean_password(self) -> str:
        """The hash in its place. It is made here: what is in a statement can get into logs and `pg_stat_activity`."""
        return make_password(self.cleaned_data["password"])


@require_POST
def sign_up(request: HttpRequest) -> HttpResponse:
    """By the statement above."""
    form = SignUp(request.POST)
    if not form.is_valid():
        return JsonResponse(form.errors, status=422)
    with connection.cursor() as cursor:
        cursor.execute(SIGN_UP, [form.cleaned_data[name] for name in ("email", "password", "referrer")])
        if not cursor.fetchall():
            return HttpResponse("this address has signed up already\n", status=409)
    return HttpResponse("welcome\n", status=201)


@require_POST
def sign_up_by_orm(request: HttpRequest) -> HttpResponse:
    """The same by a model and `atomic()`."""
    form = SignUp(request.POST)
    if not form.is_valid():  # this hashes the password, which takes a while: before the transaction
        return JsonResponse(form.errors, status=422)
    try:
        with transaction.atomic():
            user = User.objects.create(**form.cleaned_data)
            check_address.enqueue_sync("default", user.id)
    except IntegrityError:
        return HttpResponse("this address has signed up already\n", status=409)
    return HttpResponse("welcome\n", status=201)


def page(request: HttpRequest) -> HttpResponse:
    """The newest sign-ups with the states of their tasks, and what waits for somebody to implement it."""
    with connection.cursor() as cursor:
        cursor.execute(USERS)
        users = [{"email": email, "bounced": bounced, "jobs": jobs or []} for email, bounced, jobs in cursor.fetchall()]
        cursor.execute(TODO)
        todo = [{"task": task, "jobs": jobs} for task, jobs in cursor.fetchall()]
    return render(request, "signup/page.html", {"users": users, "todo": todo})
