"""The verbs over services, as pure values."""

from __future__ import annotations

from datetime import timedelta

from tallybook._db.declared import Call, Declared
from tallybook._db.texts import records
from tallybook._model.durations import format_duration
from tallybook._model.service import ServiceInfo

# Durations as numbers, because the format of an interval depends on the user's settings.
_SERVICES = """\
select cast(coalesce(json_agg(json_build_object(
  'name', s.name, 'every', extract(epoch from s.every), 'last_run_at', s.last_run_at,
  'last_took', extract(epoch from s.last_took), 'last_effect', s.last_effect) order by s.name), '[]') as text)
  from tallybook.services as s"""
_EVERY = Declared("service_every(service text, every interval) -> boolean")


services = Call("services", _SERVICES, {}, records(ServiceInfo, "last_run_at", seconds=["every", "last_took"]))


def service_every(name: str, every: timedelta) -> Call[bool]:
    return _EVERY.call(bool, service=name, every=format_duration(every))
