"""Secrets (_model/provider.py): shown only to code that asks; keys, encryption, private files."""

import base64
import copy
import dataclasses
import json
import logging
import os
import pickle
import pprint
import stat
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tallybook import Provider, Secret
from tallybook._model import provider as module
from tallybook._model.payload import encode
from tallybook._model.provider import LONGEST, Keyring, Place, Sealed, new_key, open_to_others, parse_keys
from tallybook.errors import ConfigError, NotSupported, PayloadError, SecretError
from tallybook.extra.providers.steps import KeySource

CANARY = "sk-canary-4711"
FORMER = "sk-canary-0815"
RAW = bytes(range(32))
KEY = base64.b64encode(RAW).decode()
PLACE = Place("acme", "api_key")


def provider(of: Callable[..., Any] = Secret) -> Provider:
    return Provider("acme", "market-data", {"url": "https://acme.example"}, {"api_key": of(CANARY, of(FORMER))})


def _locals_of_a_traceback(found: Any) -> str:
    try:
        raise ValueError("no luck") from KeyError(str(found))
    except ValueError as error:
        return "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())


SHOWN: dict[str, Callable[[Any], str]] = {
    "str": str,
    "repr": repr,
    "format": lambda found: f"{found} {found!r:>40}",
    "percent": lambda found: "%s" % (found,),  # noqa: UP031
    "pprint": pprint.pformat,
    "json with default=str": lambda found: json.dumps({"found": found}, default=str),
    "json with default=repr": lambda found: json.dumps([found], default=repr),
    "traceback with locals": _locals_of_a_traceback,
    "log": lambda found: logging.Formatter("%(message)s %(args)s").format(
        logging.LogRecord("x", logging.INFO, "x.py", 1, "%s %r %s", (found, found, [found]), None)
    ),
    "asdict": lambda found: (
        repr(dataclasses.asdict(found)) if dataclasses.is_dataclass(found) else ""  # type: ignore[arg-type]
    ),
    "deepcopy": lambda found: repr(copy.deepcopy([found])),
    "secrets": lambda found: (
        f"{found.secrets} {found.secrets['api_key'].previous}" if hasattr(found, "secrets") else ""
    ),
}


@pytest.mark.parametrize("way", SHOWN, ids=str)
def test_nothing_that_shows_a_value_shows_a_secret(way: str) -> None:
    """S1-12: str, repr, format, %, pprint, json, copies, logs and tracebacks with locals hide a provider's secrets."""
    whole = provider()
    for found in (whole.secrets["api_key"], whole):
        shown = SHOWN[way](found)
        assert CANARY not in shown and FORMER not in shown


def test_a_plain_text_in_its_place_is_shown() -> None:
    """Negative control: with a class that has a plain repr, all of these ways but two show the canary."""

    @dataclasses.dataclass
    class Plain:
        text: str
        previous: Any = None

    found = {way for way in SHOWN if CANARY in SHOWN[way](provider(Plain).secrets)}
    assert set(SHOWN) - found <= {"asdict", "secrets"}  # they read providers only


def test_a_secret_leaves_its_process_by_no_serialiser() -> None:
    """Pickle, JSON and the encoder of args and results refuse a secret, with an error that does not show it."""
    whole = provider()
    for found in (whole, whole.secrets["api_key"]):
        for ship in (pickle.dumps, json.dumps, lambda found: found.__getstate__() if found is not whole else 1 / 0):
            with pytest.raises((TypeError, ZeroDivisionError)) as refused:
                ship(found)
            assert CANARY not in str(refused.value)
        with pytest.raises(PayloadError) as unfit:
            encode({"found": found}, task="t", what="result")
        assert CANARY not in str(unfit.value)


def test_who_asks_gets_it() -> None:
    """reveal() returns the text, previous the former secret; secrets are equal by text, and never equal to a text."""
    found = provider().secrets["api_key"]
    assert found.reveal() == CANARY and found.previous is not None and found.previous.reveal() == FORMER
    assert found == Secret(CANARY) and found != CANARY and len({found, Secret(CANARY)}) == 1
    assert copy.copy(found) is found


# Keys, encryption, and files that only their owner reads


def keys(*texts: str) -> Keyring:
    return parse_keys(Secret(",".join(texts)), "TALLYBOOK_KEYS")


def shown(error: BaseException) -> str:
    """The error as a tool that shows local variables prints it, from the library's first frame on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    assert frames is not None
    found = traceback.TracebackException(type(error), error, frames, capture_locals=True)
    return "".join(found.format()) + str(vars(error))


def test_a_secret_is_aes_256_gcm_with_a_tag_and_what_it_is_bound_to() -> None:
    """S1-12: a secret is AES-256-GCM with a 96-bit nonce, a 16-byte tag and the documented additional data."""
    sealed = keys(f"k1:{KEY}").seal(PLACE, Secret("sésame"))
    assert (sealed.key_id, len(sealed.nonce), len(sealed.ciphertext)) == ("k1", 12, len("sésame".encode()) + 16)
    bound = b'["tallybook.provider_secret",1,"acme","api_key","current","k1"]'
    assert AESGCM(RAW).decrypt(sealed.nonce, sealed.ciphertext, bound).decode() == "sésame"
    assert keys(f"k1:{KEY}").open(PLACE, sealed) == Secret("sésame")


def test_every_encryption_has_a_fresh_nonce() -> None:
    """Encrypting the same secret at the same place 1000 times gives 1000 nonces and 1000 ciphertexts."""
    ring = keys(f"k1:{KEY}")
    made = [ring.seal(PLACE, Secret("x")) for _ in range(1000)]
    assert len({one.nonce for one in made}) == len({one.ciphertext for one in made}) == 1000


def test_the_first_key_is_the_current_one_and_the_others_still_open() -> None:
    """A rotation puts the new key first: it encrypts, and the old key still decrypts what it encrypted."""
    old = keys(f"k1:{KEY}").seal(PLACE, Secret("x"))
    ring = keys(new_key("k2"), f"k1:{KEY}")
    assert (ring.current, ring.ids) == ("k2", ["k2", "k1"])
    assert ring.seal(PLACE, Secret("x")).key_id == "k2" and ring.open(PLACE, old) == Secret("x")


@pytest.mark.parametrize(
    ("place", "changes"),
    [
        pytest.param(Place("evil", "api_key"), {}, id="another provider"),
        pytest.param(Place("acme", "password"), {}, id="another field"),
        pytest.param(Place("acme", "api_key", "previous"), {}, id="another slot"),
        pytest.param(Place('acme","api_key', ""), {}, id="parts that are cut elsewhere"),
        pytest.param(PLACE, {"key_id": "k2"}, id="another key id"),
        pytest.param(PLACE, {"nonce": bytes(12)}, id="another nonce"),
        pytest.param(PLACE, {"ciphertext": b"short"}, id="cut off"),
        pytest.param(PLACE, {"ciphertext": b""}, id="empty"),
    ],
)
def test_what_was_moved_or_altered_is_one_clear_error(place: Place, changes: dict[str, Any]) -> None:
    """S1-13: a ciphertext cannot be decrypted at another provider, field, slot or key id, or with another nonce."""
    ring = keys(f"k1:{KEY}", f"k2:{KEY}")  # refused although both ids have the same key
    sealed = ring.seal(PLACE, Secret("sk-canary"))
    with pytest.raises(SecretError, match=r"it cannot be decrypted with key 'k[12]'") as refused:
        ring.open(place, dataclasses.replace(sealed, **changes))
    error = refused.value
    assert (error.provider, error.field, error.slot) == (place.provider, place.field, place.slot)
    assert error.__cause__ is None and error.__context__ is None
    assert not any(text in shown(error) for text in ("sk-canary", KEY, repr(RAW)))


def test_every_altered_bit_is_noticed() -> None:
    """S1-13: a change of any single bit of nonce, ciphertext or tag is detected."""
    ring = keys(f"k1:{KEY}")
    sealed = ring.seal(PLACE, Secret("sk"))
    for name in ("nonce", "ciphertext"):
        text = getattr(sealed, name)
        for bit in range(8 * len(text)):
            altered = bytearray(text)
            altered[bit // 8] ^= 1 << bit % 8
            with pytest.raises(SecretError):
                ring.open(PLACE, dataclasses.replace(sealed, **{name: bytes(altered)}))


def test_without_what_it_is_bound_to_a_moved_ciphertext_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with empty additional data, a ciphertext that was moved to another provider decrypts."""
    monkeypatch.setattr(module, "_bound_to", lambda place, key_id: b"")
    ring = keys(f"k1:{KEY}")
    assert ring.open(Place("evil", "password"), ring.seal(PLACE, Secret("sk-canary"))) == Secret("sk-canary")


def test_a_wrong_and_an_unknown_key_are_told_apart() -> None:
    """S1-13: a wrong key under the id does not decrypt; an unknown id is named, with the ids that the program has."""
    sealed = keys(f"k1:{KEY}").seal(PLACE, Secret("sk-canary"))
    with pytest.raises(SecretError, match=r"secret 'api_key' of provider 'acme': it cannot be decrypted with key 'k1'"):
        keys(new_key("k1")).open(PLACE, sealed)
    with pytest.raises(SecretError, match=r"it is encrypted with key 'k1', but this program has k3, k2"):
        keys(new_key("k3"), new_key("k2")).open(PLACE, sealed)
    with pytest.raises(SecretError, match=r"but this program has no keys\. Keys are read from TALLYBOOK_KEYS"):
        KeySource().keyring().open(PLACE, sealed)


@pytest.mark.parametrize("text", ["", "x" * (LONGEST + 1), "sk-canary\ud800"], ids=["empty", "long", "surrogate"])
def test_what_is_no_secret_is_refused(text: str) -> None:
    """A secret has 1 byte to 64 KiB of text; the error for any other value shows nothing of it."""
    with pytest.raises(SecretError, match="has 1 to 65536 bytes of text") as refused:
        keys(f"k1:{KEY}").seal(PLACE, Secret(text))
    assert refused.value.__context__ is None and "sk-canary" not in shown(refused.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (KEY, "entry 1 is not ID:KEY"),
        (f"{KEY}:k1", "entry 1 is not ID:KEY"),
        (f"k1:{KEY},k2", "entry 2 is not ID:KEY"),
        (f"k1:{KEY},k1:{KEY}", "there are two keys 'k1'"),
        (f"k1:{KEY[:-4]}", "key 'k1' is not base64 of 32 bytes"),
        (f"k1:{KEY[:-1]}", "key 'k1' is not base64 of 32 bytes"),
        (f"k1:{KEY}!", "key 'k1' is not base64 of 32 bytes"),
        (f"k{'1' * 32}:{KEY}", "entry 1 is not ID:KEY"),
        ("# nothing", "there is no key in it"),
    ],
)
def test_keys_that_cannot_be_read(text: str, why: str) -> None:
    """The error for a wrong key names its entry or id and shows no key, not even in local variables."""
    with pytest.raises(ConfigError, match=why) as refused:
        keys(text)
    assert KEY[:20] not in shown(refused.value) and refused.value.__context__ is None


def test_keys_of_a_file_follow_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TALLYBOOK_KEYS_FILE has one key per line, with comments; a replaced file is read again without a restart."""
    file = tmp_path / "keys"
    monkeypatch.setenv("TALLYBOOK_KEYS_FILE", str(file))
    source = KeySource()
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        source.keyring()
    file.write_text(f"# of this year\nk1:{KEY}  # the only one\n")
    assert source.keyring().ids == ["k1"] and source.keyring() is source.keyring()
    (tmp_path / "new").write_text(f"{new_key('k2')}\nk1:{KEY}\n")
    (tmp_path / "new").replace(file)
    assert source.keyring().ids == ["k2", "k1"]
    monkeypatch.setenv("TALLYBOOK_KEYS", f"k1:{KEY}")
    with pytest.raises(ConfigError, match="TALLYBOOK_KEYS is set as well"):
        source.keyring()
    monkeypatch.delenv("TALLYBOOK_KEYS_FILE")
    assert source.keyring().ids == ["k1"] and KEY not in repr(source.keyring())
    monkeypatch.delenv("TALLYBOOK_KEYS")
    assert source.keyring().current is None
    with pytest.raises(SecretError, match="there is no key to encrypt it with"):
        source.keyring().seal(PLACE, Secret("x"))


def test_a_key_file_that_is_no_text_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A binary key file raises a ConfigError without the file's content."""
    file = tmp_path / "keys"
    file.write_bytes(b"k1:" + KEY.encode() + b"\xff")
    monkeypatch.setenv("TALLYBOOK_KEYS_FILE", str(file))
    with pytest.raises(ConfigError, match="not a text file") as refused:
        KeySource().keyring()
    assert refused.value.__context__ is None


def test_new_keys_are_random_and_can_be_read() -> None:
    """`provider key` makes 32 random bytes under a given or a random id."""
    made = [new_key() for _ in range(50)]
    assert len({key.split(":")[1] for key in made}) == 50
    assert keys(new_key("2026-a")).current == "2026-a" and all(keys(key).current for key in made)
    with pytest.raises(ConfigError, match="id: 'a b'"):
        new_key("a b")


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a program with keys needs the extra `crypto`, and the error names it."""
    for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(NotSupported, match=r"pip install 'tallybook\[crypto\]'"):
        keys(f"k1:{KEY}")
    assert KeySource().keyring().current is None


def test_opening_takes_any_bytes() -> None:
    """Any bytes stored as nonce and ciphertext raise SecretError, never another exception."""
    ring = keys(f"k1:{KEY}")
    for length in (0, 1, 7, 8, 12, 16, 128, 129, 4096):
        with pytest.raises(SecretError):
            ring.open(PLACE, Sealed("k1", os.urandom(length), os.urandom(length)))


@pytest.mark.parametrize(
    ("mode", "owner", "us", "is_open"),
    [
        (0o600, 1000, 1000, False),
        (0o400, 0, 0, False),
        (0o640, 1000, 1000, True),
        (0o640, 0, 0, True),
        (0o440, 1001, 1000, True),
        (0o440, 0, 1000, False),
        (0o640, 0, 1000, False),
        (0o660, 0, 1000, True),
        (0o444, 0, 1000, True),
        (0o441, 0, 1000, True),
    ],
)
def test_a_private_file_is_its_owners_or_roots_for_one_group(mode: int, owner: int, us: int, is_open: bool) -> None:
    """A file is private if only its owner has access, or if root owns it, its group may read it and we are not root."""
    about = os.stat_result((stat.S_IFREG | mode, 0, 0, 1, owner, 1000, 0, 0, 0, 0))
    assert open_to_others(about, us) is is_open
