"""The page, and sign-up by SQL and by a model."""

from django import forms
from django.contrib.auth.hashers import make_password
from django.db import IntegrityError, connection, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.views.decorators.http import require_POST

from examples.signup.jobs import check_address
from examples.signup.models import User

# One statement and one round trip hash the password and write the user and the tasks together, or nothing. No Python of
# Tallybook runs here, and `thank_referrer` is not implemented yet.
SIGN_UP = """\
with u as (
  insert into signup_user (email, password, referrer, checked, bounced) values (%s, signup_hash(%s), %s, false, false)
  on conflict (email) do nothing returning id, referrer
)
select tallybook.enqueue('default', 'check_address', jsonb_build_object('user_id', u.id)),
       case when u.referrer <> ''
            then tallybook.enqueue('default', 'thank_referrer', jsonb_build_object('user_id', u.id)) end
  from u"""

# The page of a small site, which reads all jobs. In a large site, give jobs links and query by them (docs/sql.md).
USERS = """\
select u.email, u.bounced,
       (select json_agg(json_build_object('task', j.task, 'state', j.state, 'unserved', j.unserved,
                                          'error', j.last_error) order by j.id)
          from tallybook.job j where j.args = jsonb_build_object('user_id', u.id))
  from (select * from signup_user order by id desc limit 25) u order by u.id desc"""
TODO = "select task, count(*) from tallybook.job where unserved group by task order by task"


class SignUp(forms.Form):
    """The form of a sign-up."""

    email = forms.EmailField()
    password = forms.CharField(min_length=8, max_length=200, strip=False)
    referrer = forms.EmailField(required=False)


@require_POST
def sign_up(request: HttpRequest) -> HttpResponse:
    """Sign up by the statement above."""
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
    """Sign up by a model and `atomic()`. Only SQL can enqueue `thank_referrer`, which Python does not know yet."""
    form = SignUp(request.POST)
    if not form.is_valid():
        return JsonResponse(form.errors, status=422)
    hashed = make_password(form.cleaned_data.pop("password"))  # before the transaction, because it takes a while
    try:
        with transaction.atomic():
            user = User.objects.create(**form.cleaned_data, password=hashed)
            check_address.enqueue_sync("default", user.id)
    except IntegrityError:
        return HttpResponse("this address has signed up already\n", status=409)
    return HttpResponse("welcome\n", status=201)


def page(request: HttpRequest) -> HttpResponse:
    """Show the newest sign-ups with the states of their tasks, and the tasks that are not implemented yet."""
    with connection.cursor() as cursor:
        cursor.execute(USERS)
        users = [{"email": email, "bounced": bounced, "jobs": jobs or []} for email, bounced, jobs in cursor.fetchall()]
        cursor.execute(TODO)
        todo = [{"task": task, "jobs": jobs} for task, jobs in cursor.fetchall()]
    return render(request, "signup/page.html", {"users": users, "todo": todo})
