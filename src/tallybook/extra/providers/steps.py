"""The steps of the verbs for providers: generators that yield Calls, shared by sync and async callers.

This module decrypts and encrypts between two statements. A secret value is only ever in a Secret. The keys are those of
TALLYBOOK_KEYS, or of the file that TALLYBOOK_KEYS_FILE names.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tallybook._db.declared import Call, Declared, Simple, View
from tallybook._db.texts import loads, record, records
from tallybook._db.verb import Steps
from tallybook._model.options import check_name
from tallybook._model.provider import Field, Keyring, Listed, Place, Provider, Route, Sealed, Secret, Stored, parse_keys
from tallybook.errors import ConfigError, SecretError, UnknownProvider

_TRIES = 20
_NOWHERE = "TALLYBOOK_KEYS, or the file that TALLYBOOK_KEYS_FILE names"


def _sealed(row: Mapping[str, str]) -> Sealed:
    return Sealed(row["key_id"], bytes.fromhex(row["nonce"]), bytes.fromhex(row["ciphertext"]))


def _stored(row: Mapping[str, Any]) -> Stored:
    secrets = {Place(row["name"], one["field"], one["slot"]): _sealed(one) for one in row["secrets"]}
    return Stored(row["name"], row["kind"], row["settings"], row["active"], secrets)


def _stored_or_none(found: str | None) -> Stored | None:
    return None if found is None else _stored(loads(found))


_READ = Simple("_provider_read(p_name text) -> jsonb", _stored_or_none, verb="provider")
"""One provider with its ciphertexts, or None."""
# One statement, so that the route and the provider are of one snapshot.
_RESOLVE = Declared("provider_resolve(data_type text, symbol text) -> text")
_ALL = f"""\
select cast(coalesce(json_agg({_READ.called(p_name="p.name")} order by p.name), '[]') as text)
  from tallybook.providers as p where p.active"""  # noqa: S608
_ALL_NAMES = "select cast(coalesce(json_agg(p.name order by p.name), '[]') as text) from tallybook.providers as p"
_LIST = """\
select cast(coalesce(json_agg(to_jsonb(p) || jsonb_build_object(
  'routes', (select count(*) from tallybook.provider_routes as r where r.provider = p.name),
  'fields', (select coalesce(json_agg(json_build_object('field', f.field, 'slot', f.slot, 'key_id', f.key_id,
               'set_at', f.set_at, 'sealed_at', f.sealed_at) order by f.field, f.slot), '[]')
               from tallybook.provider_field as f where f.provider = p.name)) order by p.name), '[]') as text)
  from tallybook.providers as p where p.name = coalesce(cast(%(name)s as text), p.name)"""
_MATCHING = "r.data_type, r.symbol nulls last"
ROUTES = View("providers", "provider_routes", records(Route), which="data_type", order=_MATCHING)
"""The routes, of one kind of data or all; specific ones first, in the order of matching."""
_SET = Declared("provider_set(name text, kind text, settings jsonb, active boolean) -> text")
DROP = Simple("provider_drop(name text) -> boolean", bool)
SET_ROUTE = Simple(
    "route_set(data_type text, provider text, symbol text, active boolean) -> text", str, unknown=UnknownProvider
)
DROP_ROUTE = Simple("route_drop(data_type text, symbol text) -> boolean", bool)
_SECRET_SET = Declared("""
  _provider_secret_set(p_provider p_field text, p_was bytea, p_key_id text, p_nonce p_ciphertext bytea,
                       p_former_key_id text, p_former_nonce p_former_ciphertext bytea)
  -> boolean""", unknown=UnknownProvider)  # fmt: skip
"""False: `was` is not the stored value any more."""
_RESEAL = Declared("""
  _provider_secret_reseal(p_provider p_field p_slot text, p_was bytea, p_key_id text, p_nonce p_ciphertext bytea)
  -> boolean""", verb="provider_rotate")  # fmt: skip
"""False: the secret has changed since it was read, or is locked."""
_SECRET_DROP = Simple("_provider_secret_drop(p_provider p_field p_slot text) -> boolean", bool)
"""Deletes a slot of a secret, or all slots."""
_OTHER_KEYS = Declared("""
  _provider_secrets_under_others(p_key_id p_provider p_field p_slot text)
  -> jsonb""", verb="provider_rotate")  # fmt: skip
_KEYS = """\
select cast(coalesce(json_object_agg(k.key_id, k.n), '{}') as text)
  from (select s.key_id, count(*) as n from tallybook.provider_field as s group by s.key_id) as k"""


def selected(data_type: str, symbol: str | None) -> Call[Stored | None]:
    """Return the provider selected by the routes, or None."""
    sql = f"select cast({_READ.called(p_name=_RESOLVE.called())} as text)"
    return Call("provider_resolve", sql, {"data_type": data_type, "symbol": symbol}, _stored_or_none)


_ACTIVE: Call[list[Stored]] = Call("providers", _ALL, {}, lambda found: list(map(_stored, loads(found))))
"""All active providers, in one snapshot."""
NAMES: Call[list[str]] = Call("providers", _ALL_NAMES, {}, loads)  # the names of all providers, active or not
_KEYS_IN_USE: Call[dict[str, int]] = Call("providers", _KEYS, {}, loads)  # the number of secrets per key


def listed(name: str | None = None) -> Call[list[Listed]]:
    """Return all providers, or one, for people."""
    return Call("providers", _LIST, {"name": name}, _listed)


def set_(name: str, kind: str | None, settings: Mapping[str, Any] | None, active: bool | None) -> Call[str]:
    text = None if settings is None else json.dumps(settings, ensure_ascii=False, allow_nan=False)
    return _SET.call(str, name=name, kind=kind, settings=text, active=active)


def _listed(found: str) -> list[Listed]:
    return [record(Listed, row | {"fields": [record(Field, one) for one in row["fields"]]}) for row in loads(found)]


def _parts(sealed: Sealed | None, prefix: str = "") -> dict[str, Any]:
    return {prefix + name: getattr(sealed, name, None) for name in ("key_id", "nonce", "ciphertext")}


@dataclass(frozen=True, slots=True)
class Rotation:
    """The result of a rotation. If nothing is `left` under other keys, those keys can be removed."""

    key_id: str
    """The current key."""
    rotated: int
    """Secrets that were encrypted again, previous values included."""
    left: dict[str, int]
    """The number of secrets that are encrypted with another key, by its id."""
    problems: tuple[SecretError, ...] = ()
    """The errors of the secrets that could not be decrypted and were left."""


@dataclass(frozen=True, slots=True)
class Tested:
    """Whether one stored secret can be decrypted here."""

    provider: str
    field: str
    slot: str
    key_id: str
    problem: SecretError | None = None


class KeySource:
    """The current keyring, parsed again when the variable or the file changes, also while workers run."""

    def __init__(self) -> None:
        self._seen: object = None
        self._keyring = Keyring({}, _NOWHERE)

    def keyring(self) -> Keyring:
        """Return the current keys, an empty keyring if neither variable is set. ConfigError if they cannot be read."""
        text = Secret(os.environ.get("TALLYBOOK_KEYS", ""))
        path = os.environ.get("TALLYBOOK_KEYS_FILE", "")
        if text.reveal().strip() and path:
            hint = "Unset one of them; a program that rotates its keys without a restart needs the file"
            raise ConfigError("TALLYBOOK_KEYS_FILE", path, "TALLYBOOK_KEYS is set as well", hint=hint)
        seen: object = text
        if path:
            try:
                about = Path(path).stat()
            except OSError as error:
                raise _unreadable(path, error) from None
            seen = (path, about.st_mtime_ns, about.st_size, about.st_ino)
        if seen != self._seen:
            if path:
                self._keyring = parse_keys(_read(path), "TALLYBOOK_KEYS_FILE")
            elif text.reveal().strip():
                self._keyring = parse_keys(text, "TALLYBOOK_KEYS")
            else:
                self._keyring = Keyring({}, _NOWHERE)
            self._seen = seen
        return self._keyring


def _read(path: str) -> Secret:
    try:
        return Secret(Path(path).read_text("utf-8"))
    except OSError as error:
        raise _unreadable(path, error) from None
    except UnicodeDecodeError:
        problem = ConfigError("TALLYBOOK_KEYS_FILE", path, "not a text file")
    raise problem  # without the error above, which contains the bytes of the file


def _unreadable(path: str, error: OSError) -> ConfigError:
    return ConfigError("TALLYBOOK_KEYS_FILE", path, f"cannot be read: {error.strerror}")


def get(name: str, keys: KeySource) -> Steps[Provider]:
    stored = yield from _known(name)
    if not stored.active:
        raise UnknownProvider(name, inactive=True)
    return _decrypted(stored, keys)


def resolve(data_type: str, symbol: str | None, keys: KeySource) -> Steps[Provider | None]:
    stored = yield selected(data_type, symbol)
    return None if stored is None else _decrypted(stored, keys)


def load(keys: KeySource) -> Steps[dict[str, Provider]]:
    found: list[Stored] = yield _ACTIVE
    return {stored.name: _decrypted(stored, keys) for stored in found}


def test(name: str, keys: KeySource) -> Steps[list[Tested]]:
    stored = yield from _known(name)
    found = []
    for place, sealed in stored.secrets.items():
        problem = None
        try:
            keys.keyring().open(place, sealed)
        except SecretError as error:
            problem = error
        found.append(Tested(place.provider, place.field, place.slot, sealed.key_id, problem))
    return found


def set_secret(name: str, field: str, secret: Secret, keys: KeySource, *, keep_previous: bool) -> Steps[str]:
    check_field(field)
    place, before = Place(name, field), Place(name, field, "previous")
    keyring = keys.keyring()
    for _ in range(_TRIES):
        stored = yield from _known(name)
        was = stored.secrets.get(place)
        former = None
        if was is not None and keep_previous:
            old = keyring.open(place, was)
            if old == secret:
                return "unchanged"
            former = keyring.seal(before, old)
        parts = {**_parts(keyring.seal(place, secret)), **_parts(former, "former_")}
        if (yield _SECRET_SET.call(bool, provider=name, field=field, was=None if was is None else was.nonce, **parts)):
            return "created" if was is None else "changed"
    raise SecretError(name, field, "other programs keep changing it", hint="Try again")


def drop_secret(name: str, field: str, *, previous_only: bool) -> Steps[bool]:
    yield from _known(name)
    return bool((yield _SECRET_DROP(name, field, "previous" if previous_only else None)))


def rotate(keys: KeySource) -> Steps[Rotation]:
    """Encrypt all secrets with the current key, each in its own transaction."""
    keyring = keys.keyring()
    if keyring.current is None:
        raise ConfigError("TALLYBOOK_KEYS", None, "there is no key", hint="`tallybook provider key` prints one")
    rotated, moved = 0, -1
    problems: dict[Place, SecretError] = {}
    while moved:  # until a pass changes nothing: a program with older keys may set secrets meanwhile
        moved, problems = 0, {}
        after: Place | None = None
        while batch := (yield _under_other_keys(keyring.current, after)):
            for after, sealed in batch:
                try:
                    secret = keyring.open(after, sealed)
                except SecretError as error:
                    problems[after] = error
                    continue
                parts = _parts(keyring.seal(after, secret))
                if (yield _RESEAL.call(bool, **asdict(after), was=sealed.nonce, **parts)):
                    moved += 1
        rotated += moved
    in_use: dict[str, int] = yield _KEYS_IN_USE
    left = {key_id: n for key_id, n in in_use.items() if key_id != keyring.current}
    return Rotation(keyring.current, rotated, left, tuple(problems.values()))


def _under_other_keys(key_id: str, after: Place | None) -> Call[list[tuple[Place, Sealed]]]:
    """Return at most 100 secrets that are encrypted with another key than this one, in order, after a place."""
    return _OTHER_KEYS.call(
        lambda found: [(Place(row["provider"], row["field"], row["slot"]), _sealed(row)) for row in loads(found)],
        key_id=key_id, **asdict(after or Place("", "", "")),
    )  # fmt: skip


def check_field(field: str) -> None:
    """Raise ConfigError if `field` is not a valid name. The text is not shown: it may be the secret itself."""
    try:
        check_name("field", field, 64)
        fits = "=" not in field
    except ConfigError:
        fits = False
    if not fits:
        raise ConfigError("field", "(not shown)", "a field has 1 to 64 bytes and no =", hint="Like api_key or password")


def _known(name: str) -> Steps[Stored]:
    stored: Stored | None = yield _READ(name)
    if stored is None:
        raise UnknownProvider(name, (yield NAMES))
    return stored


def _decrypted(stored: Stored, keys: KeySource) -> Provider:
    secrets: dict[str, Secret] = {}
    if stored.secrets:  # a provider without secrets needs neither keys nor the package cryptography
        keyring = keys.keyring()
        opened = {place: keyring.open(place, sealed) for place, sealed in stored.secrets.items()}
        for place, secret in opened.items():
            if place.slot == "current":
                secret.previous = opened.get(Place(place.provider, place.field, "previous"))
                secrets[place.field] = secret
    return Provider(stored.name, stored.kind, stored.settings, secrets)
