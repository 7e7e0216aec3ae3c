"""The dashboard in a real browser: a real `tallybook web` and a real worker on a database with hostile names and texts.

Each page and each action is visited; anything that the browser refuses, logs to its console, or runs from a text fails.
"""

import http.server
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import anyio
import psycopg
import pytest
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.support.ui import Select

from support.chromium import DESK, PHONE, TABLET, Browser, browser, needed
from support.cli import Command
from support.dashboard import JOBS, NO_PAGES, PASSWORD, covers, routes, users_file
from support.dashboard_app import HOSTILE, IMG, LONG, QUEUE, SECRET, app, furnish
from support.database import fresh
from support.hands import Hands, put
from support.paths import TESTS
from support.waiting import wait_until
from tallybook.extra.dashboard.site import CSP
from tallybook.web import dashboard

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LOOKS = [(size, theme) for theme in ("light", "dark") for size in (DESK, TABLET, PHONE)]


@pytest.fixture(scope="module")
def data(server: Any, template: str) -> Iterator[str]:
    """A database with jobs in all states, and a worker that runs some of them."""
    needed()
    with fresh(server, template) as dsn:
        yield dsn


@pytest.fixture(scope="module")
def site(data: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a dashboard that may change things, beside a worker."""
    anyio.run(furnish, data)
    folder = tmp_path_factory.mktemp("web")
    words = ("worker", "-A", "support.dashboard_app:app", "--queues", "mail=2,slow=2,feeds=2", "--name", f"w{IMG}")
    given = {"dsn": data, "PYTHONPATH": str(TESTS)}
    with Command(folder, *words, **given), Command(folder, "web", "--port", "0", "--operate", **given) as web:
        with psycopg.connect(data, autocommit=True) as conn:
            conn.execute("select tallybook.enqueue('slow', 'stay', '{\"n\": 1}')")
            busy = "select 1 from tallybook.job where task = 'stay' and state = 'running'"
            wait_until(lambda: conn.execute(busy).fetchone(), "the worker runs a job", seconds=40)
        yield web.address()


@pytest.fixture(scope="module")
def window(data: str) -> Iterator[Browser]:
    with browser() as one:
        yield one


@pytest.fixture
def look(window: Browser) -> Iterator[Browser]:
    """The window at desktop size, without old complaints; a complaint on the last page fails the test."""
    window.size(*DESK)
    window.scheme("light")
    window.complaints()
    yield window
    assert window.complaints() == []


def walk(look: Browser, site: str, check: Callable[[str], None], most: int = 80) -> set[str]:
    """Visit every linked page, one for each path and set of parameters, and call `check` on each."""
    left, seen, done = ["/"], Counter(["/"]), set[str]()
    known = routes(dashboard(app, dsn="host=/nowhere"), "GET")
    while left and len(done) < most:
        address = left.pop(0)
        look.get(site + address)
        check(address)
        done.add(address)
        for link in look.run("return [...document.querySelectorAll('a[href]')].map((a) => a.href)"):
            parts = urlsplit(link)
            path = parts.path + (f"?{parts.query}" if parts.query else "")
            kind = re.sub(r"\d+", "#", parts.path) + "?" + ",".join(sorted(re.findall(r"([^=&]+)=", parts.query)))
            # test_dashboard_forms finds links to missing pages.
            fresh = path not in done and path not in left and seen[kind] < (JOBS if "#" in kind else 1)
            if link.startswith(site) and fresh and any(covers(one, [path]) for one in known):
                seen[kind] += 1
                left.append(path)
    return done


def test_the_collector_hears_what_a_text_would_do(look: Browser) -> None:
    """Control: the payload without escaping is detected, refused by the policy or run without it."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = f"<!doctype html><title>x</title><body>{HOSTILE}{IMG}</body>".encode()
            self.send_response(200)
            self.send_header("content-type", "text/html")
            if "strict" in self.path:
                self.send_header("content-security-policy", CSP)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *said: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as bare:
        threading.Thread(target=bare.serve_forever, daemon=True).start()
        base = f"http://localhost:{bare.server_address[1]}"
        heard: list[str] = []

        def hears(word: str) -> bool:
            heard.extend(look.complaints())
            return any(word in one for one in heard)

        look.get(f"{base}/strict")
        wait_until(lambda: hears("script-src"), "the policy has refused it")
        assert "fired" not in heard
        look.get(f"{base}/open")
        wait_until(lambda: hears("fired"), "it has run")
        bare.shutdown()
    look.get("about:blank")
    look.complaints()


def test_every_page_is_quiet_and_shows_hostile_texts_as_text(look: Browser, site: str, data: str) -> None:
    """S1-26: no page breaks the policy, writes to the console, runs a text or shows a secret.

    In both themes and three widths texts are easy to read and no page scrolls sideways; no table on desktop or phone.
    """
    # Texts with a contrast below 4.5, and elements that scroll sideways; disabled ones are skipped.
    shortcomings = """
const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
  .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
  .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
const behind = (one) => {
  const back = rgb(getComputedStyle(one).backgroundColor);
  return (back[3] ?? 1) === 1 || !one.parentElement ? back : behind(one.parentElement);
};
const found = [], seen = new Set();
const measure = (one, color, text) => {
  const pair = [light(rgb(color)), light(behind(one))].sort((a, b) => b - a);
  const contrast = (pair[0] + 0.05) / (pair[1] + 0.05);
  if (contrast < 4.5) found.push(`${contrast.toFixed(2)} ${one.tagName}.${one.className}: ${text.trim().slice(0, 40)}`);
};
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const one = walker.currentNode.parentElement;
  const passed = !walker.currentNode.data.trim() || seen.has(one) || !one.checkVisibility();
  if (passed || one.closest(":disabled, script, noscript")) continue;
  seen.add(one);
  measure(one, getComputedStyle(one).color, walker.currentNode.data);
}
for (const one of document.querySelectorAll("[placeholder]")) {
  measure(one, getComputedStyle(one, "::placeholder").color, one.placeholder);
}
for (const one of [document.documentElement, ...(innerWidth === 820 ? [] : document.querySelectorAll(".scroll"))]) {
  const wide = one.scrollWidth - one.clientWidth;
  if (wide > 0) found.push(`${one.querySelector("thead")?.innerText ?? "the page"} scrolls sideways by ${wide}`);
}
return found;"""

    def live(look: Browser) -> None:
        """Wait until the live parts of the page have come, if it has any."""
        wait_until(lambda: look.run("return document.readyState") == "complete", "the page is loaded")
        if look.run("return !!document.querySelector('[data-live]')"):
            wait_until(
                lambda: look.run("return performance.getEntriesByType('resource').length > 0"),
                "its parts are asked for",
            )

    shown: list[str] = []
    found: list[str] = []

    def check(address: str) -> None:
        live(look)
        assert look.complaints() == [], address
        assert look.run("return document.querySelectorAll('h1').length") == 1, address
        assert look.run("return document.querySelectorAll('main, nav').length") >= 2, address
        assert look.run("return document.querySelectorAll('img[src=x], main script, svg script').length") == 0, address
        unnamed = look.run(
            "return [...document.querySelectorAll('input:not([type=hidden]), select, textarea')]"
            ".filter((one) => !one.labels.length && !one.ariaLabel).map((one) => one.outerHTML)"
        )
        assert unnamed == [], address
        shown.append(look.text)
        for size, theme in LOOKS:
            look.size(*size)
            look.scheme(theme)
            found.extend(f"{address} {size[0]} {theme}: {one}" for one in look.run(shortcomings))
        look.size(*DESK)
        look.scheme("light")
        assert look.complaints() == [], address

    with psycopg.connect(data, autocommit=True) as conn:  # an earlier test may have removed what leads to a page
        for action in ("/dead/retry", "/jobs/cancel", "/subject/move", "/schedule/pause", "/limit/breaker/close"):
            _staged(conn, action)
    walked = walk(look, site, check)
    assert not found, "\n".join(found)
    look.run("document.querySelector('h1').style.color = '#888'")
    assert "H1" in str(look.run(shortcomings))  # the control
    pages = dashboard(app, dsn=data)
    missed = [path for path in routes(pages, "GET") if path not in NO_PAGES and not covers(path, walked)]
    assert not missed
    text = "\n".join(shown)
    assert IMG in text  # as text
    assert SECRET not in text


def test_the_menu_of_a_phone(look: Browser, site: str) -> None:
    """At 390 pixels the menu and the filters are folded and can be opened, and the menu navigates."""
    look.size(*PHONE)
    look.get(site + "/")
    assert not look.find("nav#nav").is_displayed()
    menu = look.find("[data-menu]")
    assert menu.get_attribute("aria-expanded") == "false"
    menu.click()
    assert menu.get_attribute("aria-expanded") == "true" and look.find("nav#nav").is_displayed()
    look.press(look.find("nav#nav a[href$='/queues']"))
    assert look.path == "/queues"
    look.get(site + "/jobs")
    assert not look.find("#filters").is_displayed()
    look.find("[aria-controls=filters]").click()
    assert look.find("#filters").is_displayed()


def test_live_parts_follow_without_a_reload(look: Browser, site: str, data: str) -> None:
    """The overview shows a change in the database without a reload; the stale note stays hidden."""
    look.get(site + "/")
    look.run("window.same = true")
    with psycopg.connect(data, autocommit=True) as conn:
        conn.execute("select tallybook.queue_set('brand-new')")
        conn.execute("select tallybook.enqueue('brand-new', 'send', '{\"to\": \"x\"}')")
    wait_until(lambda: "brand-new" in look.text, "the new queue appears")
    assert look.run("return window.same") is True
    assert not look.find("[data-stale]").is_displayed()
    wait_until(lambda: len(look.all(".chart canvas")) == 2, "the charts are drawn")
    legend = look.run("return [...document.querySelectorAll('.u-series td')].map((one) => one.innerText)")
    assert len(legend) == 8 and all(re.search(r"\d", one) for one in legend), legend
    assert all(re.fullmatch(r"[\d-]{10} \d\d:\d\d UTC", one) for one in (legend[0], legend[3])), legend
    look.find("a[data-span='7d']").click()
    shown = "return [...document.querySelectorAll('[data-chart]')].map((one) => one.dataset.span)"
    assert look.run(shown) == ["7d", "15m"] and look.run("return window.same") and look.path == "/?flow=7d"


def test_a_list_is_frozen_while_jobs_are_chosen(look: Browser, site: str, data: str) -> None:
    """Bulk actions are off until a job is selected; then the list is frozen, and counts newer jobs."""
    with psycopg.connect(data, autocommit=True) as conn:
        put(conn, queue="list", task="first")
        look.get(f"{site}/jobs?queue=list")
        assert not look.find("[data-chosen]").is_enabled() and look.find("[data-hold]").text == "Live"
        look.find("tbody input").click()
        assert look.find("[data-chosen]").is_enabled()
        for _ in range(3):
            put(conn, queue="list", task="next")
    wait_until(lambda: look.find("[data-hold]").text == "Frozen: 3 newer", "they are counted")
    assert len(look.all("tbody tr")) == 1
    look.find("[data-hold]").click()
    wait_until(lambda: len(look.all("tbody tr")) == 4, "the newest list")
    assert not look.find("[data-chosen]").is_enabled() and look.find("[data-hold]").text == "Live"


def test_light_and_dark(look: Browser, site: str) -> None:
    """The page follows the system's theme; the switch inverts it, and the choice is kept across pages."""

    def back() -> str:
        return str(look.run("return getComputedStyle(document.body).backgroundColor"))

    look.get(site + "/queues")
    light = back()
    look.scheme("dark")
    wait_until(lambda: back() != light, "dark is dark")
    dark = back()
    look.find("[data-theme-switch]").click()
    assert back() == light
    look.get(site + "/")
    assert back() == light
    look.find("[data-theme-switch]").click()
    assert back() == dark
    look.run("localStorage.clear()")


def test_by_keyboard(look: Browser, site: str) -> None:
    """The first tab shows the skip link; then come the links in their order, each with a visible outline."""
    look.get(site + "/queues")

    def tab() -> Any:
        ActionChains(look.driver).send_keys(Keys.TAB).perform()
        return look.driver.switch_to.active_element

    skip = tab()
    assert "skip" in skip.get_attribute("class") and skip.rect["x"] >= 0
    names = []
    for _ in range(4):
        one = tab()
        names.append(look.run("return arguments[0].innerText.split('\\n')[0]", one))
        assert look.run("return getComputedStyle(arguments[0]).outlineStyle", one) == "solid", names
    assert names == ["Tallybook", "Overview", "Queues", "Jobs"]
    skip = look.find(".skip")
    look.run("arguments[0].focus()", skip)
    skip.send_keys(Keys.ENTER)
    assert look.run("return document.activeElement.id") == "main"

    def press(key: str) -> str:
        ActionChains(look.driver).send_keys(key).perform()
        one = look.driver.switch_to.active_element
        return str(look.run("return arguments[0].name || arguments[0].innerText", one))

    rows = look.run("return [...document.querySelectorAll('tbody tr a:first-of-type')].map((one) => one.innerText)")
    assert [press(key) for key in "jjk"] == [rows[0], rows[1], rows[0]]
    assert press("/") == "q" and press("j") == "q"  # it is typed
    assert look.find("[name=q]").get_attribute("value") == "j"
    look.run("document.activeElement.blur()")
    press("?")
    assert look.find("#keys").is_displayed() and "next row" in look.find("#keys").text
    press(Keys.ESCAPE)
    assert not look.find("#keys").is_displayed()


def test_the_side_bar_counts(look: Browser, site: str, data: str) -> None:
    """The side bar counts queues, open jobs, dead letters and workers, also on a page without live parts."""
    with psycopg.connect(data, autocommit=True) as conn:
        put(conn, queue="counted", task="nothing")
        sums = conn.execute(
            "select count(*), sum(available + running), sum(dead) from tallybook.queue_stats"
        ).fetchone()
        look.get(site + "/audit")
        read = "return [...document.querySelectorAll('[data-count]')].map((one) => one.innerText.replace(',', ''))"
        wait_until(lambda: look.run(read) == [*map(str, sums or ()), "1"], f"the counts {sums}")


def test_a_preview_counts_on_by_itself(look: Browser, site: str, data: str) -> None:
    """A preview counts on by itself, as the doctor's page does, and its action covers all found jobs."""
    with psycopg.connect(data, autocommit=True) as conn:
        conn.execute("select tallybook.enqueue('many', 'bulk', '{}') from generate_series(1, 600)")
        look.get(site + "/jobs/preview?verb=cancel&task=bulk")
        wait_until(lambda: "Cancel 600 jobs?" in look.text, "it has found all")
        look.press(look.find("#found button.danger"))
        assert "600 jobs cancelled" in look.text
        left = conn.execute(
            "select count(*) from tallybook.job where task = 'bulk' and state <> 'cancelled'"
        ).fetchone()
        assert left == (0,)
    look.get(site + "/maintenance")
    wait_until(lambda: look.all("#findings:not([aria-busy])"), "the doctor has been everywhere")
    assert "checks passed" in look.text
    assert look.complaints() == []


@pytest.mark.timeout(900)  # some 600 pages
def test_every_action_works_from_its_form(look: Browser, site: str, data: str) -> None:
    """S2-09: each button of each page, its form filled in in a browser, leads to a page with a notice.

    The actions rotate through both themes and three widths.
    """
    find_buttons = """
document.querySelectorAll("details").forEach((one) => { one.open = true; });
document.querySelectorAll("[data-check-all]:not(:checked)").forEach((one) => { one.click(); });
return [...document.querySelectorAll("form[method=post] button")]
  .filter((one) => one.checkVisibility() && !one.disabled)
  .map((one) => [new URL(one.hasAttribute("formaction") ? one.formAction : one.form.action).pathname, one])"""

    def _destroys(action: str) -> int:
        """Destructive actions come last."""
        return 2 if "drop" in action else int(any(word in action for word in ("truncate", "cancel", "forget")))

    def _buttons(look: Browser) -> dict[str, Any]:
        """The first button for each action of this page that a person can press."""
        found: dict[str, Any] = {}
        look.hold_still()
        for action, button in look.run(find_buttons):
            found.setdefault(action, button)
        return found

    sent, gone = set[str](), set[str]()
    places: dict[str, str] = {}

    def collect(address: str) -> None:
        for action in _buttons(look):
            places.setdefault(action, address)

    walk(look, site, collect)
    for n, action in enumerate(sorted(places, key=_destroys)):
        size, theme = LOOKS[n % len(LOOKS)]
        look.size(*size)
        look.scheme(theme)
        look.get(site + places[action])
        button = _buttons(look).get(action)
        if button is None:  # an earlier action, or the worker, has removed it
            held: list[str] = []
            walk(look, site, lambda address: held.append(address) if action in _buttons(look) else None)  # noqa: B023
            if held:
                look.get(site + held[0])
                button = _buttons(look).get(action)
        if button is None:
            gone.add(action)
            continue
        look.complaints()
        submit(look, look.run("return arguments[0].form", button), button)
        if not action.endswith("/preview"):
            assert look.all(".notice"), f"{action} said nothing: {look.text[:300]}"
        assert "Something went wrong" not in look.text, action
        assert look.complaints() == [], action
        sent.add(action)
    # Few actions lose their object to earlier ones; every button leads to an action.
    assert len(gone) <= len(places) // 3, gone
    offered = set(routes(dashboard(app, dsn=data), "POST")) - {"/login", "/logout"}  # see below
    assert sent <= offered and len(sent) >= len(offered) // 2, sent - offered
    # The others need something that the walk did not meet, or has removed.
    with psycopg.connect(data, autocommit=True) as conn:
        for action in sorted(offered - sent):
            look.get(site + _staged(conn, action))
            button = _buttons(look)[action]
            submit(look, look.run("return arguments[0].form", button), button)
            assert look.all(".notice.done") and look.complaints() == [], (action, look.find(".notice").text)
        audits = "select count(*) from tallybook.audits where via = 'web'"
        assert conn.execute(audits).fetchone()[0] >= 3  # type: ignore[index]


def _staged(conn: psycopg.Connection[Any], action: str) -> str:
    """Create what this action needs; return the address of a page with its button."""
    queue, name = f"stage {action}", f"stage {action}"
    conn.execute("select tallybook.queue_set(%s)", (queue,))
    if action == "/dead/cancel" or re.fullmatch("/(dead|jobs?)/(drop|retry)|/subject/retry", action):
        hands = Hands(conn, queue)
        if action == "/subject/retry":
            conn.execute("select tallybook.subject_push(%s, 'staged', %s)", (queue, name))
        else:
            put(conn, queue=queue, task="staged", max_attempts=1)
        (job,) = hands.start()
        assert hands.fail(job, final=True) == "dead"
        conn.execute("select tallybook.worker_stop(%s)", (hands.worker,))
        return {"/dead": f"/dead?queue={quote(queue)}", "/job": f"/job/{job.id}",
                "/jobs": f"/jobs?queue={quote(queue)}",
                "/subject": f"/subject?task=staged&name={quote(name)}"}[action.rpartition("/")[0]]  # fmt: skip
    if action.startswith("/limit/"):
        conn.execute("select tallybook.breaker_set(%s, 1, '1 min', '1 hour')", (name,))
        conn.execute("select tallybook.rate_limit_set(%s, 1, '1 min')", (name,))
        conn.execute("select tallybook.concurrency_limit_set(%s, 1)", (name,))
        if action == "/limit/breaker/close":
            conn.execute("select tallybook.breaker_open(%s)", (name,))
        return "/limits"
    if action.startswith("/schedule/"):
        conn.execute("select tallybook.schedule_set(%s, 'staged', every => '1 day')", (name,))
        if action == "/schedule/resume":
            conn.execute("select tallybook.schedule_pause(%s)", (name,))
        return f"/schedule?name={quote(name)}"
    if action.startswith("/subject/"):  # planned, so that it can be moved, cancelled and forgotten
        conn.execute(
            "select tallybook.subject_push(%s, 'staged', %s, run_at => now() + interval '1 day')", (queue, name)
        )
        return f"/subject?task=staged&name={quote(name)}"
    if action == "/queue/resume":
        conn.execute("select tallybook.pause(%s)", (queue,))
    if action != "/queue/drop":  # which is refused while there are jobs
        put(conn, queue=queue, task="staged")
    job = conn.execute("select max(id) from tallybook.job").fetchone()
    path = {"job": f"job/{job and job[0]}", "jobs": f"jobs?queue={quote(queue)}"}
    return "/" + path.get(action.split("/")[1], f"queue?name={quote(queue)}")


def submit(look: Browser, form: Any, button: Any = None) -> None:
    """Fill in the required fields, press the button, and accept a confirmation."""
    for one in form.find_elements("css selector", "details"):
        look.run("arguments[0].open = true", one)
    look.run("for (let e = arguments[0]; e; e = e.parentElement) if (e.matches('details')) e.open = true", form)
    name = look.run("return arguments[0].querySelector('input[name=name]')?.value ?? ''", form)
    for one in form.find_elements("css selector", "input:not([type=hidden]), textarea"):
        kind = one.get_attribute("type")
        if kind in ("checkbox", "radio"):
            if one.is_displayed() and one.get_attribute("name") in ("job", "all") and not one.is_selected():
                one.click()
        elif one.get_attribute("required") and not one.get_attribute("value"):
            one.send_keys(name if one.get_attribute("name") == "confirm" else "1")
    for one in form.find_elements("css selector", "select"):
        Select(one).select_by_index(0)
    look.run("window.confirm = () => true")
    button = button or form.find_element("css selector", "button")
    look.run("arguments[0].scrollIntoView({block: 'center'})", button)
    look.press(button)


def test_a_queue_is_paused_emptied_and_dropped_by_a_person(look: Browser, site: str, data: str) -> None:
    """S2-09: with a hostile name, a queue is paused and emptied with notices; a wrong confirmation does nothing."""
    with psycopg.connect(data, autocommit=True) as conn:
        name = f"empty me {IMG}"
        for _ in range(3):
            conn.execute("select tallybook.enqueue(%s, 'nothing', '{}')", (name,))
        look.get(f"{site}/queues?q=empty+me")
        look.press(look.find("tbody a.name"))
        assert look.find("h1").text == name
        pause = next(one for one in look.all("form") if one.get_attribute("action").endswith("/queue/pause"))
        submit(look, pause)
        assert f"Queue {name} is paused." in look.find(".notice.done").text
        empty = next(one for one in look.all("form") if one.get_attribute("action").endswith("/queue/truncate"))
        empty.find_element("css selector", "input[name=confirm]").send_keys("something else")
        submit(look, empty)
        assert "Nothing was changed" in look.find(".notice.problem").text
        empty = next(one for one in look.all("form") if one.get_attribute("action").endswith("/queue/truncate"))
        submit(look, empty)
        assert "3 jobs cancelled" in look.find(".notice.done").text
        found = conn.execute(
            "select available + waiting from tallybook.queue_stats where queue = %s", (name,)
        ).fetchone()
        assert found == (0,)


def test_login_and_logout_in_a_browser(look: Browser, site: str, data: str, tmp_path: Path) -> None:
    """A visitor logs in first and then gets the linked page; a logout ends the session; bob sees no forms."""
    words = ("web", "--port", "0", "--users", str(users_file(tmp_path)))
    with Command(tmp_path, *words, dsn=data, PYTHONPATH=str(TESTS)) as guarded:
        look.get(f"{guarded.address()}/queue?name=mail")
        assert look.path.startswith("/login")
        for name, password in (("ada", "wrong password"), ("ada", PASSWORD)):
            look.find("input[name=name]").clear()
            look.find("input[name=name]").send_keys(name)
            look.find("input[name=password]").send_keys(password)
            submit(look, look.find("form.stack"))
        assert look.path == "/queue?name=mail"
        assert look.run("return document.cookie") == ""  # no script can read it
        assert look.all("form[action$='/queue/set']")
        submit(look, look.find("form[action$='/logout']"))
        assert look.path == "/login"
        look.find("input[name=name]").send_keys("bob")
        look.find("input[name=password]").send_keys(PASSWORD)
        submit(look, look.find("form.stack"))
        look.get(f"{guarded.address()}/queue?name=mail")
        assert not look.all("form[action$='/queue/set']") and "read only" in look.text
        look.get("about:blank")  # else the page polls on while its process ends, and complains at any time after that
    # The console reports the 401 for the wrong password; nothing else.
    assert [one for one in look.complaints() if "401" not in one] == []


def test_a_long_name_and_a_thousand_queues(look: Browser, site: str, data: str) -> None:
    """A name of 64 bytes without a space does not break the page; a thousand queues come a hundred at a time."""
    with psycopg.connect(data, autocommit=True) as conn:
        conn.execute("select tallybook.queue_set('many-' || n) from generate_series(1, 1000) n")
        conn.execute("select tallybook.queue_set(%s)", (LONG[:60],))
    look.get(f"{site}/queues?q=many-&order=name")
    assert len(look.all("tbody tr")) == 100
    assert "of 1,000" in look.text
    look.press(look.find(".pager a"))
    assert "101 to 200" in look.text
    for width in (PHONE, DESK):
        look.size(*width)
        look.get(f"{site}/queue?name={LONG[:60]}")
        assert look.run("return document.documentElement.scrollWidth - innerWidth") <= 0
    assert QUEUE
