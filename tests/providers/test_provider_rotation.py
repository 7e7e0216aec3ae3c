"""Rotation of keys while workers run: no read fails, and no new secret is lost."""

import asyncio
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.workers import SLEEPY, eventually, working
from tallybook import App, Context, Secret
from tallybook._db import sync
from tallybook._db.declared import Call
from tallybook._db.sync import done
from tallybook._db.verb import drive
from tallybook._model.provider import new_key
from tallybook.extra.providers import Providers, steps
from tallybook.extra.providers.steps import KeySource

K1, K2 = new_key("k1"), new_key("k2")


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the keys."""
    file = tmp_path / "keys"
    file.write_text(K1)
    monkeypatch.setenv("TALLYBOOK_KEYS_FILE", str(file))
    return file


def replace(file: Path, *keys: str) -> None:
    """Put a new file in its place, as in production."""
    new = file.with_suffix(".new")
    new.write_text("\n".join(keys))
    new.replace(file)


async def many(app: App, count: int) -> None:
    """Make a provider with this many secrets, half of them with a previous one."""
    await app.providers.set("acme", kind="market-data")
    for n in range(count):
        await app.providers.set_secret("acme", f"key{n}", f"one {n}")
        if n % 2:
            await app.providers.set_secret("acme", f"key{n}", f"two {n}")


def under(db: Any) -> dict[str, int]:
    rows = db.execute("select key_id, count(*) from tallybook.provider_secret group by 1").fetchall()
    return {row[0]: row[1] for row in rows}


def whole(secrets: Any, count: int) -> bool:
    return all(
        secrets[f"key{n}"] == Secret(f"{'two' if n % 2 else 'one'} {n}")
        and (secrets[f"key{n}"].previous == Secret(f"one {n}") if n % 2 else secrets[f"key{n}"].previous is None)
        for n in range(count)
    )


@pytest.mark.parametrize(
    "too_early", [pytest.param(False, id="rotated", marks=pytest.mark.slow), pytest.param(True, id="control")]
)
async def test_a_rotation_while_workers_run(dsn: str, db: Any, keys: Path, too_early: bool) -> None:
    """S1-12: every job reads all secrets while k2 is added, rotated to (twice at once, during a set) and k1 removed.

    The negative control: if k1 is taken away too early, jobs die; the error names provider, field and keys.
    """
    app = App("shop", dsn=dsn)
    seen: list[str] = []

    @app.task(max_attempts=1)
    async def use(ctx: Context, n: int) -> None:
        acme = await ctx.providers.get("acme")
        seen.append(acme.secrets["key1"].reveal())
        assert whole({**acme.secrets, "key1": Secret("two 1", Secret("one 1"))}, 20)  # one snapshot

    await many(app, 20)
    app.providers.fresh_for *= 0
    async with working(app, dsn, **SLEEPY):
        await app.enqueue_many(app, [use.job(n) for n in range(150)])
        await eventually(lambda: len(seen) > 20, "some have run")
        if too_early:
            replace(keys, K2)
        else:
            other = Providers(app)  # like the command line's
            replace(keys, K2, K1)
            await asyncio.gather(other.rotate(), other.rotate(), other.set_secret("acme", "key1", "three"))
            assert (await other.rotate()).left == {} and under(db) == {"k2": 30}
            replace(keys, K2)
        await app.enqueue_many(app, [use.job(n) for n in range(30)])
        ended = "select count(*) from tallybook.job where state in ('completed', 'dead')"
        await eventually(lambda: db.execute(ended).fetchone()[0] == 180, "all have ended")
    rows = db.execute("select distinct state || ' ' || coalesce(last_error, '') from tallybook.job").fetchall()
    if too_early:
        (failed,) = {row[0] for row in rows if row[0].startswith("dead")}
        assert "secret 'key0' of provider 'acme': it is encrypted with key 'k1', but this program has k2" in failed
    else:
        assert rows == [("completed ",)] and set(seen) == {"two 1", "three"}
        assert seen[-1] == "three" and len(seen) == 180
        key = (await app.providers.get("acme")).secrets["key1"]
        assert key.reveal() == "three" and key.previous == Secret("two 1")


@pytest.mark.slow
async def test_a_rotation_that_was_broken_off_goes_on(dsn: str, db: Any, keys: Path) -> None:
    """After a rotation that stops midway, all secrets open, and the next rotation does the rest: it is idempotent."""

    def stopped_after(made: Generator[Call[Any], Any, Any], conn: Any, count: int) -> None:
        """Send this many statements and no more, like a killed process."""
        said = None
        for _ in range(count):
            said = sync.run(conn, made.send(said))
        made.close()

    app = App("shop", dsn=dsn)
    await many(app, 130)
    replace(keys, K2, K1)
    stopped_after(steps.rotate(KeySource()), db, 105)  # within the second hundred
    assert under(db) == {"k1": 92, "k2": 103}
    assert whole((await app.providers.get("acme")).secrets, 130)
    stopped_after(steps.rotate(KeySource()), db, 5)
    done = await app.providers.rotate()
    assert (done.key_id, done.rotated, done.left, done.problems) == ("k2", 88, {}, ())
    again = await app.providers.rotate()
    assert again.rotated == 0 and under(db) == {"k2": 195}
    replace(keys, K2)
    assert whole((await app.providers.get("acme")).secrets, 130)


async def test_what_does_not_open_is_left_and_named(dsn: str, db: Any, keys: Path) -> None:
    """A damaged secret does not stop a rotation: the others are rotated, and it is left with its problem."""
    app = App("shop", dsn=dsn)
    await many(app, 10)
    db.execute("update tallybook.provider_secret set nonce = ciphertext_nonce"
               " from (select decode(repeat('00', 12), 'hex') as ciphertext_nonce) x"
               " where field = 'key3' and slot = 'previous'")  # fmt: skip
    replace(keys, K2, K1)
    done = await app.providers.rotate()
    assert (done.rotated, done.left) == (14, {"k1": 1})
    (problem,) = done.problems
    assert (problem.provider, problem.field, problem.slot) == ("acme", "key3", "previous")


@pytest.mark.parametrize(("guarded", "value"), [(True, "new"), (False, "one 0")], ids=["guarded", "control"])
async def test_a_rotation_does_not_overwrite_what_is_set_meanwhile(
    dsn: str, db: Any, keys: Path, guarded: bool, value: str
) -> None:
    """A secret that is set after a rotation has read its former value stays set.

    The negative control: a write that does not check what it has read brings the former secret back.
    """
    app = App("shop", dsn=dsn)
    await many(app, 1)
    replace(keys, K2, K1)
    made = steps.rotate(KeySource())
    batch = sync.run(db, next(made))
    write = made.send(batch)
    await app.providers.set_secret("acme", "key0", "new", keep_previous=False)
    if guarded:
        assert sync.run(db, write) is False
    else:
        db.execute("update tallybook.provider_secret set key_id = %s, nonce = %s::bytea, ciphertext = %s::bytea",
                   [write.params[name] for name in ("key_id", "nonce", "ciphertext")])  # fmt: skip
    done(drive(steps.rotate(KeySource()), partial(sync.run, db)))
    app.providers.forget()
    assert (await app.providers.get("acme")).secrets["key0"].reveal() == value


async def test_many_who_set_a_secret_at_once_leave_it_whole(dsn: str, db: Any, keys: Path) -> None:
    """Of eight concurrent calls, one creates a secret, seven change it; two different values remain, and both open."""
    app = App("shop", dsn=dsn)
    await app.providers.set("acme", kind="x")
    async with app.open(max_size=4):
        done = await asyncio.gather(*(app.providers.set_secret("acme", "k", str(n)) for n in range(8)))
    assert sorted(done) == ["changed"] * 7 + ["created"]
    key = (await app.providers.get("acme")).secrets["k"]
    assert key.previous is not None and {key.reveal(), key.previous.reveal()} < set(map(str, range(8)))
    assert key.reveal() != key.previous.reveal() and under(db) == {"k1": 2}
