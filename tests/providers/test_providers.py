"""app.providers: the registry, its cache, its keys, and handlers that use it."""

import asyncio
from multiprocessing import get_context
from typing import Any

import pytest

from support.workers import SLEEPY, Jobs, eventually, working
from tallybook import App, Cancel, Context, Provider, Secret
from tallybook._model.provider import new_key
from tallybook.errors import ConfigError, InvalidArgument, NotSupported, SecretError, UnknownProvider
from tallybook.extra.providers import Providers

CANARY = "sk-canary-4711"


@pytest.fixture
def app(dsn: str, monkeypatch: pytest.MonkeyPatch) -> App:
    monkeypatch.setenv("TALLYBOOK_KEYS", new_key("k1"))
    return App("shop", dsn=dsn)


async def test_a_provider_and_its_secrets(app: App, db: Any) -> None:
    """S1-12: a secret is decrypted in memory and encrypted in the table; a change keeps the former one as previous."""
    providers = app.providers
    assert (
        await providers.set("acme", kind="market-data", settings={"base_url": "https://acme.example", "n": [1, "ü"]})
        == "created"
    )
    for text, what in ((CANARY, "created"), (CANARY, "unchanged"), ("second", "changed"), ("third", "changed")):
        assert await providers.set_secret("acme", "api_key", text) == what
    acme = await providers.get("acme")
    assert (acme.name, acme.kind, acme.settings) == (
        "acme",
        "market-data",
        {"base_url": "https://acme.example", "n": [1, "ü"]},
    )
    key = acme.secrets["api_key"]
    assert key.reveal() == "third" and key.previous == Secret("second") and list(acme.secrets) == ["api_key"]
    stored = db.execute(
        "select slot, key_id, octet_length(nonce), ciphertext from tallybook.provider_secret order by slot"
    ).fetchall()
    assert [row[:3] for row in stored] == [("current", "k1", 12), ("previous", "k1", 12)]
    assert [len(row[3]) for row in stored] == [len("third") + 16, len("second") + 16]
    assert not stored[0][3].startswith(b"third") and not stored[1][3].startswith(b"second")
    assert await providers.drop_secret("acme", "api_key", previous_only=True)
    assert not await providers.drop_secret("acme", "api_key", previous_only=True)
    assert (await providers.get("acme")).secrets["api_key"].previous is None
    assert await providers.set_secret("acme", "api_key", "fourth", keep_previous=False) == "changed"
    assert (await providers.get("acme")).secrets["api_key"].previous is None
    assert await providers.drop_secret("acme", "api_key") and (await providers.get("acme")).secrets == {}
    assert await providers.drop("acme") and not await providers.drop("acme")


async def test_only_active_providers_are_loaded(app: App) -> None:
    """S1-13: get refuses an inactive provider and load leaves it out; when it is active again, both return it."""
    providers = app.providers
    for name in ("acme", "beta"):
        await providers.set(name, kind="market-data")
        await providers.set_secret(name, "api_key", name)
    await providers.set("acme", active=False)
    with pytest.raises(UnknownProvider, match="provider 'acme' is not active") as off:
        await providers.get("acme")
    assert off.value.inactive and list(await providers.load()) == ["beta"]
    with pytest.raises(UnknownProvider, match="Did you mean 'beta'"):
        await providers.get("beta2")
    await providers.set("acme", active=True)
    assert (await providers.get("acme")).active and list(await providers.load()) == ["acme", "beta"]


async def test_a_wrong_key_raises_when_the_registry_is_loaded(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """S1-13: with wrong keys or none, load, get and resolve raise one error that names provider and field."""
    await app.providers.set("acme", kind="market-data")
    await app.providers.route("equity", "acme")
    await app.providers.set_secret("acme", "api_key", CANARY)
    for keys, why in (
        (new_key("k1"), "cannot be decrypted with key 'k1'"),
        (new_key("k9"), "this program has k9"),
        ("", "this program has no keys"),
    ):
        monkeypatch.setenv("TALLYBOOK_KEYS", keys)
        fresh = App("shop", dsn=app.dsn).providers
        for ask in (fresh.load(), fresh.get("acme"), fresh.resolve("equity")):
            with pytest.raises(SecretError, match=f"secret 'api_key' of provider 'acme': .*{why}") as refused:
                await ask
            assert CANARY not in str(refused.value)
        with pytest.raises(SecretError):  # the former one cannot be kept
            await fresh.set_secret("acme", "api_key", "new")


async def test_a_lost_key_is_no_dead_end(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret whose key is lost can be set again, without keeping the former one."""
    await app.providers.set("acme", kind="market-data")
    await app.providers.set_secret("acme", "api_key", CANARY)
    monkeypatch.setenv("TALLYBOOK_KEYS", new_key("k2"))
    assert await app.providers.set_secret("acme", "api_key", "new", keep_previous=False) == "changed"
    assert (await app.providers.get("acme")).secrets["api_key"] == Secret("new")


SWAP = """\
update tallybook.provider_secret s set nonce = o.nonce, ciphertext = o.ciphertext from tallybook.provider_secret o
 where (s.provider, s.field, s.slot) = ('acme', 'api_key', 'current') and (o.provider, o.field, o.slot) = ({})"""


@pytest.mark.parametrize(
    "swap",
    [
        pytest.param(SWAP.format("'beta', 'api_key', 'current'"), id="two providers"),
        pytest.param(SWAP.format("'acme', 'password', 'current'"), id="two fields"),
        pytest.param(SWAP.format("'acme', 'api_key', 'previous'"), id="two slots"),
        pytest.param(
            "update tallybook.provider_secret set ciphertext = set_byte(ciphertext, 0, get_byte(ciphertext, 0) # 1)"
            " where provider = 'acme' and field = 'api_key' and slot = 'current'",
            id="one byte",
        ),
        pytest.param(
            "delete from tallybook.provider_secret where provider = 'acme';"
            " update tallybook.provider_secret set provider = 'acme'",
            id="the provider's name",
        ),
    ],
)
async def test_a_swapped_ciphertext_is_refused(app: App, db: Any, swap: str) -> None:
    """S1-13: a ciphertext moved to another provider, field or slot in the table, or altered, is one clear error."""
    for name, field in (("acme", "api_key"), ("acme", "password"), ("beta", "api_key")):
        await app.providers.set(name, kind="market-data")
        await app.providers.set_secret(name, field, f"{CANARY} of {name} {field}")
    await app.providers.set_secret("acme", "api_key", CANARY)
    assert all(tested.problem is None for tested in await app.providers.test("acme"))
    db.execute(swap)
    with pytest.raises(
        SecretError, match="secret 'api_key' of provider 'acme': it cannot be decrypted with key 'k1'"
    ) as refused:
        await app.providers.get("acme")
    assert (refused.value.provider, refused.value.field, refused.value.slot) == ("acme", "api_key", "current")
    assert CANARY not in str(refused.value)
    tested = {(one.field, one.slot): one.problem is None for one in await app.providers.test("acme")}
    assert tested.pop(("api_key", "current")) is False and all(tested.values())


async def test_routes_choose_the_provider(app: App) -> None:
    """S1-15, S1-16: resolve prefers the specific route to the broad one, and returns None without a route."""
    providers = app.providers
    for name in ("acme", "beta"):
        await providers.set(name, kind="market-data")
        await providers.set_secret(name, "api_key", name)
    assert await providers.resolve("equity", "RELIANCE") is None
    assert await providers.route("equity", "acme") == "created"
    assert await providers.route("equity", "beta", symbol="RELIANCE") == "created"
    found = [await providers.resolve("equity", symbol) for symbol in ("RELIANCE", "INFY", None)]
    assert [one and one.secrets["api_key"].reveal() for one in found] == ["beta", "acme", "acme"]
    assert await providers.route("equity", "beta", symbol="RELIANCE", active=False) == "changed"
    found = [await asyncio.to_thread(providers.resolve_sync, *asked) for asked in (("equity", "RELIANCE"), ("bond",))]
    assert [one and one.name for one in found] == ["acme", None]
    assert await providers.drop_route("equity", symbol="RELIANCE") and not await providers.drop_route(
        "equity", symbol="X"
    )
    with pytest.raises(UnknownProvider):
        await providers.route("equity", "nobody")
    with pytest.raises(InvalidArgument, match="is used by 1 routes"):
        await providers.drop("acme")


async def test_what_was_read_is_kept_for_five_seconds(app: App, db: Any) -> None:
    """S1-17: within fresh_for reads come from the cache, then a changed row is seen; own writes are seen at once."""

    class Clock:
        now = 1000.0

        def __call__(self) -> float:
            return self.now

    clock = Clock()
    providers = Providers(app, clock=clock)
    await providers.set("acme", kind="one")
    await providers.route("equity", "acme")
    assert (await providers.get("acme")).kind == "one" and await providers.resolve("equity")
    db.execute("update tallybook.provider set kind = 'two'; update tallybook.provider_route set active = false")
    clock.now += 4.9
    assert (await providers.get("acme")).kind == providers.get_sync("acme").kind == "one" and await providers.resolve(
        "equity"
    )
    clock.now += 0.2
    assert (await providers.get("acme")).kind == "two" and await providers.resolve("equity") is None
    await providers.set("acme", kind="three")
    assert (await asyncio.to_thread(providers.get_sync, "acme")).kind == "three"


async def test_a_change_while_it_is_read_is_not_kept(app: App) -> None:
    """A read that overlaps a write of this program is not kept."""

    def _then(generation: int, providers: Providers) -> Any:
        from tallybook.extra.providers import steps

        found = yield from steps.get("acme", providers._keys)
        providers.forget()
        return found

    providers = Providers(app)
    await providers.set("acme", kind="one")
    reading = providers._fly(("get", "acme"), _then(providers._generation, providers), providers._say)
    await reading
    assert not providers._kept


async def test_a_hundred_who_ask_at_once_are_one_statement(app: App) -> None:
    """Single flight: jobs that start together read a provider once; each gets its own copy, and errors reach all."""
    said = []

    async def say(call: Any) -> Any:
        said.append(call.verb)
        return await app._run(call)

    await app.providers.set("acme", kind="market-data", settings={"list": []})
    with app.providers.through(say):
        found = await asyncio.gather(*(app.providers.get("acme") for _ in range(100)))
        assert said == ["provider"]
        found[0].settings["list"].append("mine")
        assert found[1].settings == (await app.providers.get("acme")).settings == {"list": []}
        refused = await asyncio.gather(*(app.providers.get("x") for _ in range(10)), return_exceptions=True)
        assert all(isinstance(one, UnknownProvider) for one in refused) and len(said) == 3
        first, second = (asyncio.ensure_future(app.providers.resolve("equity")) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert await second is None  # a cancelled reader cancels no other
    assert await app.providers.resolve("equity", "x") is None and len(said) == 4


async def test_who_asks_after_a_write_joins_no_older_read(app: App) -> None:
    """A read after this program's own write does not join a read that began before it."""
    await app.providers.set("acme", kind="one")
    asked, held = asyncio.Event(), asyncio.Event()

    async def slow(call: Any) -> Any:
        found = await app._run(call)
        asked.set()
        await held.wait()
        return found

    with app.providers.through(slow):
        old = asyncio.ensure_future(app.providers.get("acme"))
        await asked.wait()
        with app.providers.through(app._run):
            await app.providers.set("acme", kind="two")
            assert (await app.providers.get("acme")).kind == "two"
        held.set()
        await old
        assert (await app.providers.get("acme")).kind == "two"


async def test_no_more_than_a_thousand_answers_are_kept(app: App) -> None:
    """At most 1000 answers are kept, so routes of many symbols do not fill the memory."""
    providers = app.providers
    for n in range(1010):
        providers._keep(("resolve", "equity", str(n)), Provider(str(n), "x"), providers._clock(), 0)
    assert len(providers._kept) == 1000 and ("resolve", "equity", "1009") in providers._kept


async def test_a_row_changed_reaches_a_running_worker(app: App, db: Any) -> None:
    """S1-17, S1-16: one row re-routes an asset while the worker runs; the handler ends a job without a provider."""
    used: list[str] = []

    @app.task
    async def fetch_price(ctx: Context, symbol: str) -> Any:
        found = await ctx.providers.resolve("equity", symbol)
        if found is None:
            return Cancel("no provider")
        used.append(found.secrets["api_key"].reveal())

    @app.task
    def fetch_plain(symbol: str) -> None:
        found = app.providers.resolve_sync("equity", symbol)
        assert found is not None
        used.append(found.name)

    for name in ("acme", "beta"):
        await app.providers.set(name, kind="market-data")
        await app.providers.set_secret(name, "api_key", name)
    await app.providers.route("equity", "acme")
    app.providers.fresh_for = app.providers.fresh_for / 50
    jobs = Jobs(app, db)
    async with working(app, app.conninfo(), **SLEEPY):
        await jobs.ends(fetch_price.enqueue_sync(db, "RELIANCE"), fetch_plain.enqueue_sync(db, "RELIANCE"))
        assert used == ["acme", "acme"]
        db.execute("insert into tallybook.provider_route values ('equity', 'RELIANCE', 'beta', true, now(), now())")

        async def served() -> str:
            await jobs.ends(fetch_price.enqueue_sync(db, "RELIANCE"))
            return used[-1]

        async with asyncio.timeout(15):
            while await served() != "beta":
                pass
        await jobs.ends(fetch_price.enqueue_sync(db, "INFY"))
        assert used[-1] == "acme"
        db.execute("update tallybook.provider set active = false")
        async with asyncio.timeout(15):
            while (ended := (await jobs.ends(fetch_price.enqueue_sync(db, "RELIANCE")))[0]).state != "cancelled":
                pass
        assert ended.reason == "no provider"


async def test_a_lifespan_can_load_them_all(app: App, db: Any) -> None:
    """S1-12: a lifespan loads the providers decrypted; the worker does not start if a secret does not open."""
    seen: list[Any] = []

    @app.lifespan
    async def clients(ctx: Context) -> Any:
        seen.append(await ctx.providers.load())
        yield

    await app.providers.set("acme", kind="market-data")
    await app.providers.set_secret("acme", "api_key", CANARY)
    async with working(app, app.conninfo(), **SLEEPY):
        await eventually(lambda: seen, "the lifespan has run")
    assert seen[0]["acme"].secrets["api_key"] == Secret(CANARY)
    await app.providers.load()
    db.execute("update tallybook.provider set kind = 'changed'")
    assert (await app.providers.get("acme")).kind == "market-data", "what was loaded is kept for a moment"
    db.execute("update tallybook.provider_secret set ciphertext = ciphertext || 'x'")
    with pytest.raises(SecretError):
        async with working(app, app.conninfo(), **SLEEPY) as worker:
            await eventually(worker.claimer.stopping.is_set, "it gives up")


async def test_a_process_that_a_handler_forks_reads_by_itself(app: App) -> None:
    """A forked process does not wait for the worker's event loop, of which it has only a copy."""
    await app.providers.set("acme", kind="market-data")

    async def in_the_worker(call: Any) -> Any:
        raise AssertionError("this loop runs in the parent only")

    with app.providers.through(in_the_worker):
        child = get_context("fork").Process(target=app.providers.get_sync, args=("acme",))
        child.start()
        await asyncio.to_thread(child.join, 20)
        child.kill()
    assert child.exitcode == 0


async def test_writes_in_the_callers_transaction(app: App, connect: Any) -> None:
    """With `conn`, all writes are in the caller's transaction: a rollback leaves nothing."""
    import psycopg

    async with await psycopg.AsyncConnection.connect(app.conninfo()) as conn:
        await app.providers.set("acme", kind="smtp", conn=conn)
        await app.providers.set_secret("acme", "password", CANARY, conn=conn)
        await app.providers.route("mail", "acme", conn=conn)
        await conn.rollback()
    with pytest.raises(UnknownProvider):
        await app.providers.get("acme")


async def test_mistakes_are_explained(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that are not JSON, a field that may be a secret, unknown providers, no keys: each is one clear error."""
    providers = app.providers
    await providers.set("acme", kind="smtp")
    with pytest.raises(InvalidArgument, match="are not JSON"):
        await providers.set("acme", settings={"x": object()})
    with pytest.raises(InvalidArgument, match="are not JSON"):
        await providers.set("acme", settings={"x": float("nan")})
    with pytest.raises(ConfigError, match="not shown") as refused:
        await providers.set_secret("acme", f"api_key={CANARY}", "x")
    assert CANARY not in str(refused.value)
    with pytest.raises(UnknownProvider):
        await providers.set_secret("acm", "password", CANARY)
    monkeypatch.delenv("TALLYBOOK_KEYS")
    with pytest.raises(SecretError, match="there is no key to encrypt it with"):
        await providers.set_secret("acme", "password", CANARY)
    with pytest.raises(ConfigError, match="there is no key"):
        await providers.rotate()
    assert (await providers.get("acme")).secrets == {}  # a provider without secrets needs no keys
    with pytest.raises(NotSupported, match=r"app\.providers"):
        _ = Context(None).providers  # type: ignore[arg-type]
