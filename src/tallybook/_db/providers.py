"""The verbs over providers, their secrets and routes, as Calls on texts and ciphertexts; nothing is decrypted here."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tallybook._db.declared import Call, Declared, Simple, View
from tallybook._db.texts import loads, record, records
from tallybook._model.provider import Place, Sealed
from tallybook.errors import UnknownProvider


@dataclass(frozen=True, slots=True)
class Stored:
    name: str
    kind: str
    settings: dict[str, Any]
    active: bool
    secrets: dict[Place, Sealed]


@dataclass(frozen=True, slots=True)
class Field:
    """One secret, described only by its key and its times."""

    field: str
    slot: str
    key_id: str
    set_at: datetime
    sealed_at: datetime


@dataclass(frozen=True, slots=True)
class Route:
    """A rule: this provider serves this kind of data, for all symbols or for one."""

    data_type: str
    symbol: str | None
    provider: str
    active: bool
    in_force: bool  # whether it applies: it and its provider are active


@dataclass(frozen=True, slots=True)
class Listed:
    """A provider for people."""

    name: str
    kind: str
    settings: dict[str, Any]
    active: bool
    created_at: datetime
    changed_at: datetime
    fields: list[Field] = field(default_factory=list)
    routes: int = 0


def _sealed(row: Mapping[str, str]) -> Sealed:
    return Sealed(row["key_id"], bytes.fromhex(row["nonce"]), bytes.fromhex(row["ciphertext"]))


def _stored(row: Mapping[str, Any]) -> Stored:
    secrets = {Place(row["name"], one["field"], one["slot"]): _sealed(one) for one in row["secrets"]}
    return Stored(row["name"], row["kind"], row["settings"], row["active"], secrets)


def _stored_or_none(found: str | None) -> Stored | None:
    return None if found is None else _stored(loads(found))


read = Simple("_provider_read(p_name text) -> jsonb", _stored_or_none, verb="provider")
"""One provider with its ciphertexts, or None."""
# One statement, so that the route and the provider are of one snapshot.
_RESOLVE = Declared("provider_resolve(data_type text, symbol text) -> text")
_ACTIVE = f"""\
select cast(coalesce(json_agg({read.called(p_name="p.name")} order by p.name), '[]') as text)
  from tallybook.providers as p where p.active"""  # noqa: S608
_NAMES = "select cast(coalesce(json_agg(p.name order by p.name), '[]') as text) from tallybook.providers as p"
_LIST = """\
select cast(coalesce(json_agg(to_jsonb(p) || jsonb_build_object(
  'routes', (select count(*) from tallybook.provider_routes as r where r.provider = p.name),
  'fields', (select coalesce(json_agg(json_build_object('field', f.field, 'slot', f.slot, 'key_id', f.key_id,
               'set_at', f.set_at, 'sealed_at', f.sealed_at) order by f.field, f.slot), '[]')
               from tallybook.provider_field as f where f.provider = p.name)) order by p.name), '[]') as text)
  from tallybook.providers as p where p.name = coalesce(cast(%(name)s as text), p.name)"""
_MATCHING = "r.data_type, r.symbol nulls last"
routes = View("providers", "provider_routes", records(Route), which="data_type", order=_MATCHING)
"""The routes, of one kind of data or all; specific ones first, in the order of matching."""
_SET = Declared("provider_set(name text, kind text, settings jsonb, active boolean) -> text")
drop = Simple("provider_drop(name text) -> boolean", bool)
route_set = Simple(
    "route_set(data_type text, provider text, symbol text, active boolean) -> text", str, unknown=UnknownProvider
)
route_drop = Simple("route_drop(data_type text, symbol text) -> boolean", bool)
_SECRET_SET = Declared("""
  _provider_secret_set(p_provider p_field text, p_was bytea, p_key_id text, p_nonce p_ciphertext bytea,
                       p_former_key_id text, p_former_nonce p_former_ciphertext bytea)
  -> boolean""", unknown=UnknownProvider)  # fmt: skip
_RESEAL = Declared("""
  _provider_secret_reseal(p_provider p_field p_slot text, p_was bytea, p_key_id text, p_nonce p_ciphertext bytea)
  -> boolean""", verb="provider_rotate")  # fmt: skip
secret_drop = Simple("_provider_secret_drop(p_provider p_field p_slot text) -> boolean", bool)
"""Deletes a slot of a secret, or all slots."""
_OTHER_KEYS = Declared("""
  _provider_secrets_under_others(p_key_id p_provider p_field p_slot text)
  -> jsonb""", verb="provider_rotate")  # fmt: skip
_KEYS_IN_USE = """\
select cast(coalesce(json_object_agg(k.key_id, k.n), '{}') as text)
  from (select s.key_id, count(*) as n from tallybook.provider_field as s group by s.key_id) as k"""


def resolve(data_type: str, symbol: str | None) -> Call[Stored | None]:
    """Return the provider selected by the routes, or None."""
    sql = f"select cast({read.called(p_name=_RESOLVE.called())} as text)"
    return Call("provider_resolve", sql, {"data_type": data_type, "symbol": symbol}, _stored_or_none)


active: Call[list[Stored]] = Call("providers", _ACTIVE, {}, lambda found: list(map(_stored, loads(found))))
"""All active providers, in one snapshot."""
names: Call[list[str]] = Call("providers", _NAMES, {}, loads)  # the names of all providers, active or not
keys_in_use: Call[dict[str, int]] = Call("providers", _KEYS_IN_USE, {}, loads)  # the number of secrets per key


def listed(name: str | None = None) -> Call[list[Listed]]:
    """Return all providers, or one, for people."""
    return Call("providers", _LIST, {"name": name}, _listed)


def set_(name: str, kind: str | None, settings: Mapping[str, Any] | None, active: bool | None) -> Call[str]:
    text = None if settings is None else json.dumps(settings, ensure_ascii=False, allow_nan=False)
    return _SET.call(str, name=name, kind=kind, settings=text, active=active)


def secret_set(place: Place, was: Sealed | None, sealed: Sealed, former: Sealed | None) -> Call[bool]:
    """Set a secret; False if `was` is not the stored value any more."""
    at: dict[str, Any] = {"provider": place.provider, "field": place.field, "was": None if was is None else was.nonce}
    return _SECRET_SET.call(bool, **at, **_parts(sealed), **_parts(former, "former_"))


def secret_reseal(place: Place, was: Sealed, sealed: Sealed) -> Call[bool]:
    """Store the same secret under another key; False if it has changed since it was read, or is locked."""
    at: dict[str, Any] = {"provider": place.provider, "field": place.field, "slot": place.slot, "was": was.nonce}
    return _RESEAL.call(bool, **at, **_parts(sealed))


def _parts(sealed: Sealed | None, prefix: str = "") -> dict[str, Any]:
    return {prefix + name: getattr(sealed, name, None) for name in ("key_id", "nonce", "ciphertext")}


def under_other_keys(key_id: str, after: Place | None) -> Call[list[tuple[Place, Sealed]]]:
    """Return at most 100 secrets that are encrypted with another key than this one, in order, after a place."""
    at = after or Place("", "", "")
    return _OTHER_KEYS.call(
        lambda found: [(Place(row["provider"], row["field"], row["slot"]), _sealed(row)) for row in loads(found)],
        key_id=key_id, provider=at.provider, field=at.field, slot=at.slot,
    )  # fmt: skip


def _listed(found: str) -> list[Listed]:
    return [record(Listed, row | {"fields": [record(Field, one) for one in row["fields"]]}) for row in loads(found)]
