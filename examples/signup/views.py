"""The page, and sign-up by SQL and by models."""

from django.db import IntegrityError, connection, transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_POST

from examples.signup.jobs import check_address
from examples.signup.models import User

# One statement, one round trip: the user and the tasks are there together, or none of them is. No code of Tallybook's runs
# here, and nobody has implemented `thank_referrer` yet.
SIGN_UP = """\
with u as (
  insert into signup_user (email, referrer, checked, bounced) values (%s, %s, false, false)
  on conflict (email) do nothing returning id, referrer
)
select tallybook.enqueue('default', 'check_address', jsonb_build_object('user_id', u.id)),
       case when u.referrer <> '' then tallybook.enqueue('default', 'thank_referrer', jsonb_build_object('user_id', u.id)) end
  from u"""

USERS = """\
select u.email, u.bounced,
       (select json_agg(json_build_object('task', j.task, 'state', j.state, 'unserved', j.unserved, 'error', j.last_error)
                        order by j.id)
          from tallybook.job j where j.args = jsonb_build_object('user_id', u.id))
  from (select * from signup_user order by id desc limit 25) u order by u.id desc"""
TODO = "select task, count(*) from tallybook.job where unserved group by task order by task"


@require_POST
def sign_up(request: HttpRequest) -> HttpResponse:
    """By the statement above."""
    with connection.cursor() as cursor:
        cursor.execute(SIGN_UP, [request.POST["email"], request.POST.get("referrer", "")])
        if not cursor.fetchall():
            return HttpResponse("this address has signed up already\n", status=409)
    return HttpResponse("welcome\n", status=201)


@require_POST
def sign_up_by_orm(request: HttpRequest) -> HttpResponse:
    """The same by a model and `atomic()`."""
    try:
        with transaction.atomic():
            user = User(email=request.POST["email"], referrer=request.POST.get("referrer", ""))
            user.save()
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
