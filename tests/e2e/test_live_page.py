"""The live page in a real browser, clicked through while a session is replayed."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Request, expect, sync_playwright
from support.provider import AUDIENCE, provider
from support.redis_server import RedisServer, free_port

from leyline_lab.demo import DEFAULT_POLICY
from leyline_lab.demo.run import shipped_trace
from leyline_lab.replay.driver import ChatDriver
from leyline_lab.stand_ins.serving import serving
from leyline_lab.traces.recordings import TraceRequest
from leyline_proxy.upstream.embedded import create_embedded_engine

TURNS = 8
START_S = 120.0
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
EXPECT_MS = 20_000


class Proxy:
    """``leyline serve`` before the replay engine, on a port that it keeps over restarts."""

    def __init__(
        self,
        engine: str,
        keys: Path | None = None,
        flags: tuple[str, ...] = (),
        *,
        awaits: str = "readyz",
    ) -> None:
        self._awaits = awaits
        self.port = free_port()
        self.origin = f"http://127.0.0.1:{self.port}"
        self._flags = ["--upstream", engine, *flags]
        if keys is not None:
            self._flags += ["--api-keys-file", str(keys)]
        self.start()

    def start(self) -> None:
        """Start it; returns once it is ready."""
        command = [str(Path(sys.executable).with_name("leyline")), "serve"]
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port), "--log-level", "error", *self._flags],
            stdout=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + START_S
        while not self._ready():
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.1)

    def stop(self) -> float:
        """Ask it to stop; return how long it took, in seconds."""
        begun = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(30) == 0
        return time.monotonic() - begun

    def replay(
        self, turns: int, *, key: str = "any", session: str = "demo", opening: str = ""
    ) -> None:
        """The first turns of the shipped session, under another system prompt if one is given."""
        (recorded,) = shipped_trace().sessions
        with closing(ChatDriver(f"{self.origin}/v1", api_key=key, policy=DEFAULT_POLICY)) as driver:
            for turn, request in enumerate(recorded.requests[:turns]):
                driver.send(under(request, opening), session=session, place=(0, turn))

    def begin(self, *sessions: str) -> None:
        """Two turns of each of these sessions that there isn't yet."""
        found = httpx.get(f"{self.origin}/v1/leyline/sessions").json()["sessions"]
        for session in {*sessions} - {each["id"] for each in found}:
            self.replay(2, session=session)

    def session(self, name: str, **headers: str) -> dict[str, Any]:
        """The API's document of a session."""
        found = httpx.get(f"{self.origin}/v1/leyline/sessions/{name}", headers=headers)
        document: dict[str, Any] = found.raise_for_status().json()
        return document

    def _ready(self) -> bool:
        try:
            return httpx.get(f"{self.origin}/{self._awaits}", timeout=5).status_code == 200
        except httpx.TransportError:
            return False


def under(request: TraceRequest, opening: str) -> TraceRequest:
    """The request under another system prompt, if one is given."""
    first = {"role": "system", "content": opening}
    return replace(request, messages=(first, *request.messages[1:])) if opening else request


@dataclass
class Watched:
    """A page, and what it said and asked for."""

    page: Page
    origin: str
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def listen(self) -> None:
        """From now on."""
        self.page.on("console", lambda message: self._note(message.type, message.text))
        self.page.on("pageerror", lambda error: self.said.append(f"pageerror: {error}"))
        self.page.on("request", self._ask)

    def check(self) -> None:
        """Nothing was said, and nothing asked of another origin."""
        assert self.said == []
        assert [url for url in self.asked if not url.startswith(f"{self.origin}/")] == []

    def _note(self, kind: str, text: str) -> None:
        # The browser itself reports refused keys and connections while a proxy is restarted.
        if "Failed to load resource" not in text:
            self.said.append(f"{kind}: {text}")

    def _ask(self, request: Request) -> None:
        self.asked.append(request.url)


@contextmanager
def opened(browser: Browser, origin: str, **options: Any) -> Iterator[Watched]:
    """The page in a browser context of its own."""
    context = browser.new_context(**options)
    context.set_default_timeout(EXPECT_MS)
    watched = Watched(context.new_page(), origin)
    watched.listen()
    watched.page.goto(f"{origin}/")
    try:
        yield watched
    finally:
        context.close()
    watched.check()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, without a window."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium: run deploy/tools.sh")
    expect.set_options(timeout=EXPECT_MS)
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield found
        found.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """The replay engine on a port of its own, which outlives the proxies."""
    with serving(create_embedded_engine("replay", {})) as origin:
        yield origin


@pytest.fixture(scope="module")
def proxy(engine: str) -> Iterator[Proxy]:
    """A proxy without keys."""
    running = Proxy(engine)
    yield running
    running.stop()


def test_a_replay_is_watched_turn_by_turn(browser: Browser, proxy: Proxy) -> None:
    """The empty page says how to start, then shows each turn with the figures of the API, by
    pointer and keyboard, as bands and as a table."""
    with opened(browser, proxy.origin) as watched:
        page = watched.page
        expect(page.get_by_role("heading", name="No sessions yet")).to_be_visible()
        replay = threading.Thread(target=proxy.replay, args=(TURNS,))
        replay.start()
        expect(page.get_by_role("option", name=re.compile("^Turn 3:"))).to_be_visible()
        replay.join(60)
        history = proxy.session("demo")["history"]
        expect(page.locator(".turn")).to_have_count(TURNS)
        page.get_by_role("option", name=re.compile("^Turn 2:")).click()
        expect(page.get_by_role("heading", name=f"Turn 2 of {TURNS}")).to_be_visible()
        for number in range(3, TURNS + 1):
            page.keyboard.press("ArrowRight")
            expect(page.get_by_role("heading", name=f"Turn {number} of {TURNS}")).to_be_visible()
            check_figures(page, history[number - 1])
        assert any(turn["receipt"]["outcome"] == "spliced" for turn in history)
        assert any(turn["edits"] for turn in history)
        page.keyboard.press("Home")
        expect(page.locator(".turn:focus")).to_have_attribute("aria-selected", "true")
        check_figures(page, history[0])
        page.get_by_role("button", name="Table").click()
        check_table(page, history)
        whole = sum(turn["receipt"]["tokens"]["prompt"] for turn in history)
        expect(page.locator("#tiles")).to_contain_text(f"of {whole:,} prompt tokens")
        expect(page.get_by_role("img", name=re.compile("^Hit ratio over the last"))).to_be_visible()


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["live", "observe"])
def test_content_from_elsewhere_is_told(browser: Browser, engine: str, mode: str) -> None:
    """Tokens from another session are a source of their own, in words and in every sum; where the
    engine only observes, the page says how many there could have been."""
    proxy = Proxy(engine, flags=("--reuse", mode))
    try:
        for name in ("first", "second"):
            proxy.replay(3, session=f"{mode}-{name}", opening=f"You are the {name} agent. " * 8)
        document = proxy.session(f"{mode}-second")
        turn = document["history"][0]
        tokens, reuse = turn["receipt"]["tokens"], turn["receipt"]["reuse"]
        assert (tokens["reused"] > 0) == (mode == "live") and reuse["tenant"] > 0
        with opened(browser, proxy.origin) as watched:
            page = watched.page
            page.get_by_role("option", name=re.compile(f"^Session {mode}-second")).click()
            page.get_by_role("option", name=re.compile("^Turn 1:")).click()
            expect(page.get_by_role("heading", name="Turn 1 of 3")).to_be_visible()
            check_figures(page, turn)
            expect(page.locator(".reuse")).to_contain_text(f"{reuse['tenant']:,} after text of an")
            beginning = "Reused: copied from another" if mode == "live" else "Could be reused:"
            expect(page.locator(".reuse")).to_contain_text(beginning)
            label = page.get_by_role("option", name=re.compile("^Turn 1:")).get_attribute("title")
            assert f" {tokens['reused']:,} reused," in (label or "")
            tile = page.locator(".tile.reused .value")
            expect(tile).to_have_text(f"{document['reused_tokens']:,}")
            bars = page.locator(".session[aria-selected=true] .mini i").evaluate_all(
                "all => all.map(each => parseFloat(each.style.width))"
            )
            assert sum(bars) == pytest.approx(100)
            page.get_by_role("button", name="Table").click()
            check_table(page, document["history"])
            assert violations(page) == []
    finally:
        proxy.stop()


def check_figures(page: Page, turn: dict[str, Any]) -> None:
    """The turn that is shown has the API's figures, bands to their scale, and its edits."""
    tokens = turn["receipt"]["tokens"]
    shown = {
        kind: int(page.locator(f".figures [data-kind={kind}] dd").inner_text().replace(",", ""))
        for kind in ("kept", "spliced", "reused", "prefilled", "freed", "prompt")
    }
    named = {"kept": "prefix", **{kind: kind for kind in shown if kind != "kept"}}
    assert shown == {kind: tokens[name] for kind, name in named.items()}
    widths = page.locator(".wide .bar i").evaluate_all(
        "all => all.map(each => each.getBoundingClientRect().width)"
    )
    whole = tokens["prompt"] + tokens["freed"]
    names = ("prefix", "spliced", "reused", "prefilled", "freed")
    expected = [tokens[name] / whole for name in names]
    assert [width / sum(widths) for width in widths] == pytest.approx(expected, abs=0.005)
    rows = page.get_by_role("group", name="Edits of the turn").locator("tbody tr")
    assert rows.count() == len(turn["edits"])
    for edit in turn["edits"]:
        expect(rows.filter(has_text=edit["cause"]).first).to_contain_text(edit["mode"])
    check_payment(page, turn)


def check_payment(page: Page, turn: dict[str, Any]) -> None:
    """The turn's payment has the API's figures: the prompt by source, lost tokens by cause."""
    tokens, busts = turn["receipt"]["tokens"], turn["busts"]
    wanted = {"kept": tokens["prefix"], "spliced": tokens["spliced"], "reused": tokens["reused"]}
    wanted["new"] = busts["new_tokens"]
    for bust in busts["entries"]:
        name = f"lost: {bust['cause']}"
        wanted[name] = wanted.get(name, 0) + bust["tokens"]
    wanted = {name: number for name, number in wanted.items() if number}
    shown = page.locator(".pay [data-part]").evaluate_all(
        "all => all.map(each => [each.dataset.part, each.querySelector('b').textContent])"
    )
    assert {name: int(text.replace(",", "")) for name, text in shown} == wanted
    widths = page.locator(".paid i").evaluate_all(
        "all => all.map(each => parseFloat(each.style.width))"
    )
    assert sum(widths) == pytest.approx(100)
    rows = page.get_by_role("group", name="Lost tokens of the turn").locator("tbody tr")
    assert rows.count() == len(busts["entries"])
    for row, bust in zip(rows.all(), busts["entries"], strict=True):
        expect(row).to_contain_text(bust["cause"])
        expect(row).to_contain_text(f"{bust['tokens']:,}")


def test_a_turn_shows_what_it_paid_for(browser: Browser, engine: str, tmp_path: Path) -> None:
    """Lost tokens stand with message, cause, time and price; unknown time is called so."""
    config = tmp_path / "leyline.yaml"
    config.write_text("prices:\n  default: {currency: EUR, prefilled: 2, cached: 0.5}\n")
    proxy = Proxy(engine, flags=("--config", str(config)))
    try:
        proxy.replay(5, session="paid", opening="You are asked what it costs. " * 8)
        with closing(ChatDriver(f"{proxy.origin}/v1", policy=DEFAULT_POLICY)) as driver:
            (recorded,) = shipped_trace().sessions
            request = under(recorded.requests[5], "You are asked what it costs. " * 8)
            first = {**request.messages[1], "content": "Another task: count the files."}
            messages = (request.messages[0], first, *request.messages[2:])
            driver.send(replace(request, messages=messages), session="paid", place=(0, 5))
        turn = proxy.session("paid")["history"][-1]
        (bust,) = [each for each in turn["busts"]["entries"] if each["cause"] == "undeclared"]
        assert bust["message"] == 1 and bust["tokens"] > 100
        with opened(browser, proxy.origin) as watched:
            page = watched.page
            page.get_by_role("option", name=re.compile("^Session paid")).click()
            expect(page.get_by_role("heading", name="Turn 6 of 6")).to_be_visible()
            expect(page.get_by_role("region", name="What did this turn pay for?")).to_be_visible()
            check_payment(page, turn)
            row = page.get_by_role("group", name="Lost tokens of the turn").locator("tbody tr")
            expect(row.first).to_contain_text(f"1 ({bust['role']})")
            expect(row.first).to_contain_text("EUR")
            said = page.locator(".pay .sum")
            unknown = bust["seconds"] is None
            expect(said).to_contain_text("time unknown" if unknown else "s, EUR")
            assert violations(page) == []
    finally:
        proxy.stop()


def check_table(page: Page, history: list[dict[str, Any]]) -> None:
    """The table has a row for each turn, with the same figures."""
    rows = page.get_by_role("group", name="Turns as a table").locator("tbody tr")
    expect(rows).to_have_count(len(history))
    for row, turn in zip(rows.all(), history, strict=True):
        cells = [cell.inner_text() for cell in row.locator("td").all()]
        tokens = turn["receipt"]["tokens"]
        names = ("prompt", "prefix", "spliced", "reused", "prefilled", "freed")
        assert [int(cell.replace(",", "")) for cell in cells[:6]] == [
            tokens[name] for name in names
        ]


def test_the_page_can_be_used_by_keyboard_and_heard(browser: Browser, proxy: Proxy) -> None:
    """Tab reaches every control in order, the focus is seen, and each list says what it is."""
    proxy.begin("demo", "other")
    with opened(browser, proxy.origin) as watched:
        page = watched.page
        expect(page.locator(".session")).to_have_count(2)
        reached = []
        for _ in range(12):
            page.keyboard.press("Tab")
            reached.append(
                page.evaluate(
                    "[document.activeElement.id || document.activeElement.className,"
                    " getComputedStyle(document.activeElement).outlineStyle]"
                )
            )
        names = [name for name, _ in reached]
        order = ["skip", "copy-url", "theme-button", "follow", "session-search", "session", "turn"]
        assert [name for name in names if name in order] == order
        assert {style for name, style in reached if name in order} == {"solid"}
        page.locator(".session[tabindex='0']").focus()
        page.keyboard.press("ArrowDown")
        expect(page.locator(".session:focus")).to_have_attribute("aria-selected", "true")
        expect(page.get_by_role("button", name="Follow latest")).to_have_attribute(
            "aria-pressed", "false"
        )
        for role, name in (
            ("listbox", "Sessions"),
            ("listbox", "Turns"),
            ("region", "Engines"),
            ("region", "Claims"),
            ("region", "Session"),
            ("list", "Legend"),
        ):
            expect(page.get_by_role(role, name=re.compile(f"^{name}")).first).to_be_visible()  # type: ignore[arg-type]
        assert page.locator("#announcer").get_attribute("aria-live") == "polite"


def test_what_somebody_reads_stays_where_it_is(browser: Browser, proxy: Proxy) -> None:
    """A mangled link breaks nothing; a new turn moves neither the focus nor what is scrolled."""
    with opened(browser, proxy.origin) as watched:
        page = watched.page
        page.evaluate("location.hash = 'session=%E0%A4%A'")
        page.reload()
        page.get_by_role("option", name=re.compile("^Session demo")).click()
        page.get_by_role("option", name=re.compile("^Turn 7:")).click()
        page.get_by_role("group", name="Edits of the turn").focus()
        proxy.replay(1, session="demo")
        expect(page.get_by_role("heading", name=f"Turn 7 of {TURNS + 1}")).to_be_visible()
        expect(page.get_by_role("group", name="Edits of the turn")).to_be_focused()
        page.get_by_role("button", name="Table").click()
        page.get_by_role("button", name="Turn 3", exact=True).focus()
        proxy.replay(1, session="demo")
        expect(page.locator(".table tbody tr")).to_have_count(TURNS + 2)
        expect(page.get_by_role("button", name="Turn 3", exact=True)).to_be_focused()


def test_a_tab_behind_others_gives_its_place_up(browser: Browser, proxy: Proxy) -> None:
    """A browser has few connections to a proxy: a tab out of view holds none."""
    with closing(browser.new_context()) as context:
        context.add_init_script("Object.defineProperty(document, 'hidden', {get: () => true})")
        page = context.new_page()
        page.clock.install()
        page.goto(f"{proxy.origin}/")
        expect(page.locator("#status-text")).to_have_text("Live", timeout=EXPECT_MS)
        page.clock.fast_forward(61_000)
        expect(page.locator("#status-text")).to_have_text("Paused", timeout=EXPECT_MS)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_to_object_to(browser: Browser, proxy: Proxy, scheme: str) -> None:
    """Names, roles and contrast hold to axe's rules, as bands and as a table; and axe would see."""
    with opened(browser, proxy.origin, color_scheme=scheme) as watched:
        page = watched.page
        expect(page.locator(".turn-view")).to_be_visible()
        assert violations(page) == []
        page.get_by_role("button", name="Table").click()
        expect(page.get_by_role("group", name="Turns as a table")).to_be_visible()
        assert violations(page) == []
        page.locator("#sessions").evaluate("each => each.removeAttribute('role')")
        page.locator("#status-text").evaluate("each => { each.style.color = 'gray' }")
        assert {"aria-required-parent", "color-contrast"} & set(violations(page))


def violations(page: Page) -> list[str]:
    """The rules of axe that the page breaks."""
    found: list[dict[str, Any]] = Axe().run(page).response["violations"]
    return [each["id"] for each in found]


def test_light_dark_and_reduced_motion(browser: Browser, proxy: Proxy) -> None:
    """The system's theme holds until another is chosen, which outlives a reload; with reduced
    motion nothing moves."""
    with opened(browser, proxy.origin, color_scheme="dark", reduced_motion="reduce") as watched:
        page = watched.page

        def background() -> str:
            return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

        expect(page.locator(".turn").first).to_be_visible()
        moves = page.locator(".turn .band i").first.evaluate(
            "each => getComputedStyle(each).transitionDuration"
        )
        assert moves == "0s"
        dark = background()
        page.locator("#theme-button").click()
        light = background()
        assert dark != light
        page.reload()
        assert background() == light
        page.locator("#theme-button").click()
        assert background() == dark


def test_sessions_are_found_by_name_model_and_client(browser: Browser, proxy: Proxy) -> None:
    """Each row shows what the search looks at; a search that fits nothing says so."""
    for name, agent in (
        ("search-a", "codex_exec/0.169.0 (Debian)"),
        ("search-b", "<b>bold</b>"),
        ("team/<i>agent</i> 7", ""),
    ):
        body = {"model": "leyline-recall", "messages": [{"role": "user", "content": name}]}
        httpx.post(
            f"{proxy.origin}/v1/chat/completions",
            json={**body, "max_tokens": 1},
            headers={"x-leyline-session": name, "user-agent": agent},
            timeout=60,
        ).raise_for_status()
    with opened(browser, proxy.origin) as watched:
        page = watched.page
        found = page.get_by_role("option", name=re.compile("^Session search-a"))
        expect(found.locator(".who")).to_have_text("leyline-recall · codex_exec/0.169.0")
        other = page.get_by_role("option", name=re.compile("^Session search-b"))
        expect(other.locator(".who")).to_have_text("leyline-recall")
        search = page.get_by_role("searchbox", name="Search sessions")
        known = page.locator(".session").count()
        for words, shown in (("codex", 1), ("RECALL search-", 2), ("search-b codex", 0)):
            search.fill(words)
            expect(page.locator(".session")).to_have_count(shown)
            expect(page.locator("#sessions-count")).to_have_text(f"{shown} of {known}")
            expect(page.locator("#announcer")).to_have_text(f"{shown} of {known} sessions fit.")
            assert violations(page) == []
        assert "No session fits." in page.evaluate(
            "getComputedStyle(document.getElementById('sessions'), '::after').content"
        )
        search.fill("<i>agent")
        named = page.get_by_role("option", name="Session team/<i>agent</i> 7")
        expect(page.locator(".session")).to_have_count(1)
        named.click()
        expect(page.locator(".detail h2")).to_have_text("Session team/<i>agent</i> 7")
        search.fill("search-")
        search.press("ArrowDown")
        page.keyboard.press("End")
        expect(page.locator(".session:focus")).to_have_attribute("data-id", "search-a")
        expect(page.locator(".detail .who")).to_have_text("leyline-recall · codex_exec/0.169.0")
        search.fill("")
        expect(page.locator(".session")).to_have_count(known)
        expect(page.locator("#sessions-count")).to_have_text(str(known))


def test_the_chosen_session_is_in_sight(browser: Browser, proxy: Proxy) -> None:
    """A link to a session far down scrolls the list to it, and nothing else."""
    names = [f"far-{number}" for number in range(8)]
    for name in names:
        proxy.replay(1, session=name)
    size = {"width": 400, "height": 800}
    with opened(browser, proxy.origin, viewport=size) as watched:
        page = watched.page
        page.evaluate("name => { location.hash = `session=${name}` }", names[0])
        page.reload()
        row = page.locator(".session[aria-selected=true]")
        expect(row).to_have_attribute("data-id", names[0])
        inside = """row => {
            const [at, list] = [row, row.parentElement].map((each) => each.getBoundingClientRect());
            return at.top >= list.top - 1 && at.bottom <= list.bottom + 1;
        }"""
        assert row.evaluate(inside)
        assert page.locator("#sessions").evaluate("each => each.scrollTop") > 0
        assert page.evaluate("scrollY") == 0


def test_a_short_session_uses_the_width_and_a_prefill_that_was_right_is_no_warning(
    browser: Browser, proxy: Proxy
) -> None:
    """Columns grow with the room; "not worth it" looks like a turn without edits."""
    for turns in (6, 1):
        proxy.replay(turns, session=f"short-{turns}")
    with opened(browser, proxy.origin) as watched:
        page = watched.page
        for turns in (6, 1):
            page.get_by_role("option", name=re.compile(f"^Session short-{turns}")).click()
            expect(page.locator(".turn")).to_have_count(turns)
            wide = "all => all.map(each => each.getBoundingClientRect().width)"
            (room,) = page.locator(".detail .place").evaluate_all(wide)
            columns = page.locator(".turn").evaluate_all(wide)
            assert room - 60 < sum(columns) <= room  # the axis has the rest
            assert max(page.locator(".turn .band").evaluate_all(wide)) <= 72
        module = f"{proxy.origin}/live/turn.js"
        classes = page.evaluate(
            """async (module) => {
                const { turnView } = await import(module);
                const tokens = { prompt: 9, prefix: 1, spliced: 0, reused: 0, prefilled: 8,
                    freed: 0 };
                return ["not_worth_it", "missing_source"].map((reason) => turnView({
                    index: 0, turn: "t", created: 0, planned: "spliced", edits: [], busts: null,
                    receipt: { outcome: "reprefilled", reason, tokens, detail: "" },
                }, 1, { now: 1 }).querySelector(".badge").className.trim());
            }""",
            module,
        )
        assert classes == ["badge", "badge reprefilled"]


def test_narrow_windows_scroll_inside_alone(browser: Browser, proxy: Proxy) -> None:
    """On a phone the page itself never scrolls sideways; tables do, within it."""
    with opened(browser, proxy.origin, viewport={"width": 400, "height": 800}) as watched:
        page = watched.page
        expect(page.locator(".turn").first).to_be_visible()
        page.get_by_role("button", name="Table").click()
        table = page.get_by_role("group", name="Turns as a table")
        expect(table).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == 400
        wide, seen = table.evaluate("each => [each.scrollWidth, each.clientWidth]")
        assert wide > seen
        table.evaluate("each => { each.scrollLeft = each.scrollWidth }")
        left = "each => each.getBoundingClientRect().left"
        number = table.get_by_role("rowheader").first
        assert number.evaluate(left) == pytest.approx(table.evaluate(left), abs=1)


@pytest.mark.nightly
def test_a_restart_under_the_page_is_survived(browser: Browser, proxy: Proxy) -> None:
    """An open page doesn't hold the shutdown, says that it reconnects, and continues by itself."""
    proxy.replay(1, session="before")
    with opened(browser, proxy.origin) as watched:
        page = watched.page
        expect(page.locator("#status-text")).to_have_text("Live")
        expect(page.locator(".session").first).to_be_visible()
        assert proxy.stop() < 10
        expect(page.locator("#status-text")).to_have_text("Reconnecting…")
        proxy.start()
        expect(page.locator("#status-text")).to_have_text("Live")
        expect(page.get_by_role("heading", name="No sessions yet")).to_be_visible()
        proxy.replay(1, session="after")
        expect(page.get_by_role("option", name=re.compile("^Session after"))).to_be_visible()


@pytest.mark.nightly
def test_the_top_says_that_no_engine_is_up(browser: Browser) -> None:
    """The proxy itself is live, and the page doesn't say so while requests would fail."""
    closed = f"http://127.0.0.1:{free_port()}"
    proxy = Proxy(closed, awaits="healthz")
    try:
        with opened(browser, proxy.origin) as watched:
            page = watched.page
            expect(page.locator("#status-text")).to_have_text("No engine is up")
            expect(page.locator("#status")).to_have_attribute("data-status", "down")
            expect(page.get_by_role("alert").first).to_contain_text("requests fail")
            expect(page.get_by_role("heading", name="No engine is up")).to_be_visible()
            expect(page.get_by_role("heading", name="No sessions yet")).to_have_count(0)
    finally:
        proxy.stop()


@pytest.mark.nightly
def test_an_empty_page_says_what_is_wrong(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Redis and all engines down, the page names both instead of asking for a first session,
    at its top, too; each goes away with its cause."""
    monkeypatch.setenv("LEYLINE_SESSION_SECRET", "a secret of the tests")
    engine = free_port()
    redis = RedisServer(tmp_path)
    monkeypatch.setenv("LEYLINE_SESSION_STORE", redis.url)
    proxy = Proxy(f"http://127.0.0.1:{engine}", awaits="healthz")
    try:
        with opened(browser, proxy.origin) as watched:
            start, top = watched.page.locator(".start"), watched.page.locator("#notice")
            expect(start.get_by_role("heading")).to_have_text("Sessions can't be read")
            for place in (start, top):
                expect(place).to_contain_text("Session store: ")
                expect(place).to_contain_text("No engine is up, so requests fail")
            expect(start).not_to_contain_text("OpenAI")
            assert violations(watched.page) == []
            redis.start()
            expect(start.get_by_role("heading")).to_have_text("No engine is up")
            expect(top).not_to_contain_text("Session store")
            with serving(create_embedded_engine("replay", {}), port=engine):
                expect(start.get_by_role("heading")).to_have_text("No sessions yet")
                expect(top).to_be_hidden()
    finally:
        proxy.stop()
        redis.kill()


def test_keys_are_asked_for_and_tenants_are_apart(
    browser: Browser, engine: str, tmp_path: Path
) -> None:
    """Without a key nothing is shown; one tenant's key shows nothing of another's."""
    keys = tmp_path / "keys"
    keys.write_text("red:key-of-red\nblue:key-of-blue\n")
    proxy = Proxy(engine, keys)
    try:
        proxy.replay(2, key="key-of-red", session="private")
        with opened(browser, proxy.origin) as watched:
            page = watched.page
            field = page.get_by_label("Key", exact=True)
            field.fill("ключ")
            page.keyboard.press("Enter")
            expect(page.locator("#key-problem")).to_contain_text("can't be a key")
            field.fill("wrong")
            page.keyboard.press("Enter")
            expect(page.locator("#key-problem")).to_contain_text("belongs to no tenant")
            field.fill("key-of-red")
            page.keyboard.press("Enter")
            expect(page.get_by_role("option", name=re.compile("^Session private"))).to_be_visible()
            stored = json.loads(page.evaluate("JSON.stringify({...localStorage})"))
            assert "key-of-red" not in json.dumps(stored)
            page.reload()
            expect(page.get_by_role("option", name=re.compile("^Session private"))).to_be_visible()
            expect(page.locator("#tenant")).to_have_text("Tenant red")
            for words, shown in (("red priv", 1), ("blue", 0)):
                page.get_by_role("searchbox", name="Search sessions").fill(words)
                expect(page.locator(".session")).to_have_count(shown)
            assert violations(page) == []
            page.get_by_role("button", name="Change key").click()
            field.fill("key-of-blue")
            page.keyboard.press("Enter")
            expect(page.get_by_role("heading", name="No sessions yet")).to_be_visible()
            expect(page.get_by_text(f"--url {proxy.origin}/v1 --api-key")).to_be_visible()
            proxy.replay(1, key="key-of-red", session="later")
            assert "private" not in page.content() and "later" not in page.content()
    finally:
        proxy.stop()


@pytest.mark.nightly
def test_a_token_of_no_tenant_can_be_replaced(
    browser: Browser, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token that the provider signed, but that may do nothing here, brings the dialog back."""
    with provider() as issuer:
        monkeypatch.setenv("LEYLINE_OIDC_ISSUER", issuer.origin)
        monkeypatch.setenv("LEYLINE_OIDC_AUDIENCE", AUDIENCE)
        monkeypatch.setenv("LEYLINE_OIDC_TENANTS", json.dumps({"agents": "red"}))
        proxy = Proxy(engine)
        try:
            with opened(browser, proxy.origin) as watched:
                page = watched.page
                field = page.get_by_label("Key", exact=True)
                field.fill(issuer.token(tenant="strangers"))
                page.keyboard.press("Enter")
                expect(page.locator("#key-problem")).to_contain_text("tenant")
                field.fill(issuer.token(tenant="agents"))
                page.keyboard.press("Enter")
                expect(page.get_by_role("heading", name="No sessions yet")).to_be_visible()
        finally:
            proxy.stop()
