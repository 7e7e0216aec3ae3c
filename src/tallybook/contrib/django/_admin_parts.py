"""The parts of the admins: lists by a cursor, without count and offset; filters; and their base, with audit rows.

The verbs run on Django's connection.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin import SimpleListFilter
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import PAGE_VAR, ChangeList
from django.contrib.auth import get_permission_codename
from django.db import DatabaseError, connections, transaction
from django.template.response import TemplateResponse

from tallybook._app import App
from tallybook._app.history import audit_add
from tallybook._app.jobs import STATES
from tallybook._db import sync
from tallybook._db.verb import Verb
from tallybook._model.job_info import JobLine, JobPage
from tallybook.contrib.django import _settings
from tallybook.errors import ConfigError, InvalidArgument, TallybookError

app = App("admin")  # for its verbs, which all run on Django's connection
_LOOKED = 20_000  # ledger rows that one page may skip at most
_MOST_NAMES = 100
_LINE = tuple(field.name for field in fields(JobLine) if field.name != "cursor")


def alias() -> str:
    return _settings.read().database


class JobList(ChangeList):
    """A page of `app.jobs.list`: one query for any number of jobs. The page number is the cursor."""

    def get_queryset(self, request: Any, exclude_parameters: Any = None) -> Any:
        """Return all jobs, by their ids, for an action; the filters are kept for `get_results`."""
        self.filter_specs, self.has_filters, unknown, _, self.has_active_filters = self.get_filters(request)
        if unknown:
            raise IncorrectLookupParameters
        self.clear_all_filters_qs = self.get_query_string(remove=self.get_filters_params())
        return self.root_queryset

    def get_results(self, request: Any) -> None:
        after = None
        if self.query.strip().isdecimal():
            self.result_list = list(self.root_queryset.filter(pk=int(self.query)))
        else:
            page = self._page(request.GET.get(PAGE_VAR) or None)
            self.result_list, after = [], page.next
            for line in page.jobs:
                row = self.model(**{name: getattr(line, name) for name in _LINE})
                row._state.adding, row._state.db = False, alias()
                self.result_list.append(row)
        self.next_url = self.get_query_string({PAGE_VAR: after}) if after else None
        self.first_url = self.get_query_string() if PAGE_VAR in request.GET else None
        self.result_count = self.full_result_count = len(self.result_list)
        self.show_full_result_count = self.can_show_all = self.multi_page = False
        self.show_admin_actions = True
        self.paginator = None

    def _page(self, after: str | None) -> JobPage:
        said = {spec.parameter_name: spec.value() for spec in self.filter_specs}
        state = self.model_admin.only_state or said.get("state")
        try:
            with transaction.atomic(using=alias()):  # an invalid cursor must not end a transaction of the request
                return app.jobs.list(
                    queue=said.get("queue"), task=self.query.strip() or said.get("task"),
                    states=[state] if state else None, after=after, max_jobs=self.list_per_page, max_looked=_LOOKED,
                ).sync(alias())  # fmt: skip
        except (ConfigError, InvalidArgument) as error:
            raise IncorrectLookupParameters(error) from error


class _Choice(SimpleListFilter):
    """A filter by one value of a column. The selected value is always listed, even if there are too many to show."""

    values: Sequence[str] = ()
    query = ""  # instead of values: a query of the first names, up to the limit

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, str]]:
        asked = self.value()
        found = column(self.query, _MOST_NAMES) if self.query else self.values
        return [(name, name) for name in (found if asked is None or asked in found else [asked, *found])]

    def queryset(self, request: Any, queryset: Any) -> Any:
        return queryset if self.value() is None else queryset.filter(**{self.parameter_name: self.value()})


class StateFilter(_Choice):
    title = parameter_name = "state"
    values = STATES


class QueueFilter(_Choice):
    title = parameter_name = "queue"
    query = "select q.name from tallybook.queues as q order by q.name limit %s"


class TaskFilter(_Choice):
    title = parameter_name = "task"
    query = "select t.name from tallybook.tasks as t order by t.name limit %s"


class PausedFilter(_Choice):
    title = parameter_name = "paused"
    values = ("no", "yes")

    def queryset(self, request: Any, queryset: Any) -> Any:
        return queryset if self.value() is None else queryset.filter(paused_at__isnull=self.value() != "yes")


def column(query: str, param: object) -> list[Any]:
    with connections[alias()].cursor() as cursor:
        cursor.execute(query, [param])
        return [found for (found,) in cursor.fetchall()]


act = partial(admin.action, permissions=["operate"])  # an action that needs the right to change what the model shows


def chosen(request: Any) -> list[str]:
    """Return the checked rows. Never all matches, because a page does not know their number."""
    return list(dict.fromkeys(request.POST.getlist(ACTION_CHECKBOX_NAME)))


def who(request: Any) -> str:
    return str(request.user.get_username())[:200] or f"user {request.user.pk}"


class Shown(admin.ModelAdmin):
    """The common base of our admins: read-only, as for people with only the right to view, plus actions."""

    list_per_page = 50
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER

    def get_queryset(self, request: Any) -> Any:
        return self.model.objects.using(alias())

    def has_add_permission(self, request: Any, obj: Any = None) -> bool:
        """Never: programs enqueue, and no form changes or deletes a row."""
        return False

    has_change_permission = has_delete_permission = has_add_permission

    def has_operate_permission(self, request: Any) -> bool:
        """Whether this person sees the actions: requires `change_*`."""
        codename = get_permission_codename("change", self.opts)
        return bool(request.user.has_perm(f"{self.opts.app_label}.{codename}"))

    def change_view(self, request: Any, object_id: str, form_url: str = "", extra_context: Any = None) -> Any:
        """Show one thing, with its actions as buttons."""
        buttons = self.get_action_choices(request, default_choices=[])
        return super().change_view(request, object_id, form_url, {"buttons": buttons, **(extra_context or {})})

    def confirmed(self, request: Any, action: str, title: str, effect: str) -> Any:
        """Return a page that asks for confirmation, or None once the person has confirmed."""
        if "confirmed" in request.POST:
            return None
        context = {
            **self.admin_site.each_context(request), "title": title, "effect": effect, "action": action,
            "opts": self.opts, "chosen": chosen(request), "checkbox": ACTION_CHECKBOX_NAME, "media": "",
        }  # fmt: skip
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "admin/tallybook/confirm.html", context)

    @contextmanager
    def step(self, request: Any) -> Iterator[None]:
        """Run one transaction; an error rolls it back and is shown to the person."""
        try:
            with transaction.atomic(using=alias()):
                yield
        except (TallybookError, DatabaseError) as error:
            self.message_user(request, f"Nothing was changed: {str(error).splitlines()[0]}", messages.ERROR)

    def record(self, request: Any, action: str, target: Mapping[str, object], done: Mapping[str, object]) -> None:
        sync.run(alias(), audit_add(who(request), "admin", action, target, done))

    def each(
        self, request: Any, noun: str, verb: str, done: str, do: Callable[[str, str], Verb[bool]], otherwise: str
    ) -> None:
        """Apply a verb to each checked thing by its name: `do(name, who)` returns whether it changed anything."""
        for name in chosen(request):
            with self.step(request):
                changed = do(name, who(request)).sync(alias())
                if changed:
                    self.record(request, f"{noun}.{verb}", {noun: name}, {done: True})
                text = f"{noun.capitalize()} {name} {done if changed else otherwise}."
                self.message_user(request, text, messages.SUCCESS if changed else messages.WARNING)
