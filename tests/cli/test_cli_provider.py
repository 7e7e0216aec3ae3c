"""tallybook provider: add, set, list, show, set-secret, drop-secret, test, rotate, key, drop, route."""

import json
import re
from typing import Any

import pytest

from support.cli import invoke
from tallybook import App
from tallybook._model.provider import new_key

CANARY = "sk-canary-4711"


def run(*words: str, dsn: str, code: int = 0, stdin: str | None = None) -> str:
    """The output of a `tallybook provider` command."""
    result = invoke("provider", *words, to=dsn, typed=stdin)
    assert result.exit_code == code, result.output
    assert CANARY not in result.output
    return result.output


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> str:
    made = invoke("provider", "key", "--id", "k1").output.strip()
    assert re.fullmatch(r"k1:[A-Za-z0-9+/]{43}=", made)
    monkeypatch.setenv("TALLYBOOK_KEYS", made)
    return made


def secret(dsn: str, name: str, field: str) -> list[str]:
    found = App("x", dsn=dsn).providers.get_sync(name).secrets[field]
    return [found.reveal(), *([found.previous.reveal()] if found.previous else [])]


def test_a_provider_by_hand(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S1-12: secrets from stdin and a variable: added, listed, shown, changed, tested, dropped; no secret is shown."""
    assert "no providers" in run("list", dsn=dsn)
    monkeypatch.setenv("ACME_KEY", CANARY)
    more = (
        "--settings",
        '{"url": "https://acme.example"}',
        "--secret",
        "a",
        "--secret",
        "b",
        "--secret-env",
        "api_key=ACME_KEY",
    )
    assert "is added" in run("add", "acme", "--kind", "market-data", *more, dsn=dsn, stdin="first\nsecond\n")
    assert [secret(dsn, "acme", field) for field in ("a", "b", "api_key")] == [["first"], ["second"], [CANARY]]
    assert "already" in run("add", "acme", "--kind", "x", dsn=dsn, code=1)
    assert re.search(r"^acme +market-data +active +a, api_key, b +k1 +0$", run("list", dsn=dsn), re.MULTILINE)
    (listed,) = json.loads(run("list", "--json", dsn=dsn))
    assert [(field["field"], field["slot"], field["key_id"]) for field in listed["fields"]] == [
        ("a", "current", "k1"), ("api_key", "current", "k1"), ("b", "current", "k1"),
    ]  # fmt: skip
    assert "ciphertext" not in run("show", "acme", "--json", dsn=dsn)
    assert "is changed" in run("set", "acme", "--inactive", dsn=dsn)
    assert "is unchanged" in run("set", "acme", "--inactive", "--kind", "market-data", dsn=dsn)
    shown = run("show", "acme", dsn=dsn)
    assert '{"url": "https://acme.example"}' in shown and "inactive" in shown and "api_key" in shown
    assert run("test", "acme", dsn=dsn).count("opens") == run("test", dsn=dsn).count("opens") == 3
    assert "is dropped" in run("drop-secret", "acme", "a", "--yes", dsn=dsn)
    assert "does not exist" in run("drop-secret", "acme", "a", "--yes", dsn=dsn)
    assert "is removed" in run("drop", "acme", "--yes", dsn=dsn)


def test_a_secret_changes_and_the_former_one_stays(dsn: str) -> None:
    """set-secret keeps the old value as previous until --drop-previous, or not at all; all of stdin is one secret."""
    run("add", "acme", "--kind", "webhook", dsn=dsn)
    for text, what in (("one\n", "created"), ("one", "unchanged"), ("-----BEGIN\ntwo\n-----END\n", "changed")):
        assert f"is {what}" in run("set-secret", "acme", "key", dsn=dsn, stdin=text)
    assert secret(dsn, "acme", "key") == ["-----BEGIN\ntwo\n-----END", "one"]
    assert re.search(r"^key +previous +k1 ", run("show", "acme", dsn=dsn), re.MULTILINE)
    assert "is dropped" in run("set-secret", "acme", "key", "--drop-previous", dsn=dsn)
    assert "does not exist" in run("set-secret", "acme", "key", "--drop-previous", dsn=dsn)
    run("set-secret", "acme", "key", "--no-previous", dsn=dsn, stdin="three")
    assert secret(dsn, "acme", "key") == ["three"]


def test_a_rotation_by_hand(dsn: str, keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """rotate reports what it did; secrets under a missing key make it end with 1, and test names the key."""
    run("add", "acme", "--kind", "x", "--secret", "a", dsn=dsn, stdin="one\n")
    new = new_key("k2")
    monkeypatch.setenv("TALLYBOOK_KEYS", new)
    assert "0 secrets" in (said := run("rotate", dsn=dsn, code=1)) and "left: 1 with key 'k1'" in said
    assert "is encrypted with key 'k1', but this program has k2" in run("test", "acme", dsn=dsn, code=1)
    assert json.loads(run("test", "--json", dsn=dsn, code=1))[0]["problem"].startswith("it is encrypted with key 'k1'")
    monkeypatch.setenv("TALLYBOOK_KEYS", f"{new},{keys}")
    assert "1 secrets are encrypted with key 'k2'\nno other key is needed" in run("rotate", dsn=dsn)
    assert "0 secrets" in run("rotate", dsn=dsn)
    monkeypatch.setenv("TALLYBOOK_KEYS", new)
    assert "opens" in run("test", "acme", dsn=dsn)


def test_routes_by_hand(dsn: str) -> None:
    """S1-15, S1-16, S1-17: set, which, list and drop; the specific route wins; 1 if none has an active provider."""
    for name in ("acme", "beta"):
        run("add", name, "--kind", "x", dsn=dsn)
    assert "no provider serves equity RELIANCE" in run("route", "which", "equity", "RELIANCE", dsn=dsn, code=1)
    assert "is created" in run("route", "set", "equity", "acme", dsn=dsn)
    assert "is created" in run("route", "set", "equity", "beta", "--symbol", "RELIANCE", dsn=dsn)
    assert run("route", "which", "equity", "RELIANCE", dsn=dsn) == "beta\n"
    run("set", "beta", "--inactive", dsn=dsn)
    assert run("route", "which", "equity", "RELIANCE", dsn=dsn) == "acme\n"
    assert re.search(r"^equity +RELIANCE +beta +its provider is inactive\nequity +\(all\) +acme +active$",
                     run("route", "list", dsn=dsn), re.MULTILINE)  # fmt: skip
    assert [one["in_force"] for one in json.loads(run("route", "list", "equity", "--json", dsn=dsn))] == [False, True]
    assert "is changed" in run("route", "set", "equity", "acme", "--inactive", dsn=dsn)
    assert "is removed" in run("route", "drop", "equity", "--symbol", "RELIANCE", dsn=dsn)
    assert "there is no route" in run("route", "drop", "equity", "--symbol", "RELIANCE", dsn=dsn, code=1)
    assert "is used by 1 routes" in run("drop", "acme", "--yes", dsn=dsn, code=1)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["show", "acne"], 1, "Did you mean 'acme'?"),
        (["set", "x", "--active"], 1, "unknown provider 'x'"),
        (["set", "acme"], 2, "pass a change"),
        (["drop", "x", "--yes"], 1, "unknown provider 'x'"),
        (["test", "x"], 1, "unknown provider 'x'"),
        (["route", "set", "equity", "acne"], 1, "Did you mean 'acme'?"),
        (["add", "b", "--kind", "x", "--settings", "[]"], 2, "--settings must be one JSON object"),
        (["add", "b", "--kind", ""], 1, "a kind of provider has 1 to 64 bytes"),
        (["add", "b", "--kind", "x", CANARY], 2, "too many arguments, or an unknown option (not shown)"),
        (["add", "b", "--kind", "x", "--secret-env", CANARY], 2, "FIELD=VARIABLE"),
        (
            ["add", "b", "--kind", "x", "--secret-env", f"a={CANARY}"],
            2,
            "no environment variable of that name (not shown)",
        ),
        (["add", "b", "--kind", "x", "--secret", f"a={CANARY}"], 2, "field: '(not shown)'"),
        (["set-secret", "acme", "a", CANARY], 2, "too many arguments, or an unknown option (not shown)"),
        (["set-secret", "acme", "a", f"--{CANARY}"], 2, "too many arguments, or an unknown option (not shown)"),
        (["set-secret", "acme", f"a={CANARY}"], 2, "field: '(not shown)'"),
        (["set-secret", "acme", "a", "--from-env", CANARY], 2, "no environment variable of that name (not shown)"),
        (["set-secret", "acme", "a"], 1, "a secret has 1 to 65536 bytes of text"),
        (["set-secret", "x", "a", "--from-env", "PATH"], 1, "unknown provider 'x'"),
    ],
)
def test_mistakes_are_explained(dsn: str, db: Any, words: list[str], code: int, text: str) -> None:
    """Each is an error that says what is wrong, changes nothing, and never repeats what may be the secret."""
    run("add", "acme", "--kind", "x", dsn=dsn)
    assert text in run(*words, dsn=dsn, code=code, stdin="")
    assert db.execute("select array_agg(name) from tallybook.provider").fetchone() == (["acme"],)
    assert db.execute("select count(*) from tallybook.provider_secret").fetchone() == (0,)


def test_a_provider_that_cannot_get_its_secrets_is_not_added(
    dsn: str, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """add is one transaction: without a key there is neither the secret nor the provider."""
    monkeypatch.delenv("TALLYBOOK_KEYS")
    assert "there is no key to encrypt it with" in run(
        "add", "b", "--kind", "x", "--secret", "a", dsn=dsn, code=1, stdin="x\n"
    )
    assert db.execute("select count(*) from tallybook.provider").fetchone() == (0,)


def test_keys_by_hand() -> None:
    """`provider key` needs no database; each key is new."""
    made = [invoke("provider", "key").output for _ in range(2)]
    assert made[0] != made[1] and all(re.fullmatch(r"k[0-9a-f]{6}:[A-Za-z0-9+/]{43}=\n", one) for one in made)
