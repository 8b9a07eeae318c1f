"""Each cache loss is counted once, under its cause, and agrees with the engines' counts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.agent_history import agent_history

from leyline_lab.stand_ins.serving import check_clean, serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import create_embedded_engine
from leyline_proxy.upstream.rendezvous import ranked
from leyline_replay.models import trained

CHAT = "/v1/chat/completions"
NAMES = ("a", "b")
POOL = 6144
TURNS = 8
REDACT = r"redact:pattern='key=\d+',replacement='[gone]'"
LIST_TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}
LATE_MARK = """{{ '[newest]' if loop.last else '' }}"""
"""A template that marks the newest message, as some do: on the next turn the mark is elsewhere."""

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass
class Stack:
    """A proxy before two engines of one model."""

    app: Any
    client: httpx.Client
    model: str
    paused: set[str] = field(default_factory=set)

    def series(self) -> Series:
        """All samples by name and labels."""
        text = self.client.get("/metrics").text
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def ask(self, session: str, messages: list[dict[str, Any]], **members: Any) -> dict[str, Any]:
        """The usage and the account of a turn."""
        body = {"model": self.model, "messages": messages, "max_tokens": 2, "temperature": 0}
        answer = self.client.post(
            CHAT,
            json={**body, "ignore_eos": True, **members},
            headers={"x-leyline-session": session},
        )
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def drain(self, name: str, draining: bool) -> None:
        self.app.state.services.pool.get(name).draining = draining


def start(stack: ExitStack, **options: Any) -> str:
    engine = create_embedded_engine("replay", {"device": "cpu", "pool_tokens": POOL, **options})
    origin = stack.enter_context(serving(engine))
    stack.callback(check_clean, engine)
    return origin


@pytest.fixture(scope="module")
def two() -> Iterator[Stack]:
    """Two engines that splice, with small pools."""
    with ExitStack() as stack:
        upstreams = {name: start(stack) for name in NAMES}
        app = create_app(Settings(upstreams=upstreams, log_level="error"))
        origin = stack.enter_context(serving(app))
        client = stack.enter_context(httpx.Client(base_url=origin, timeout=60))
        yield Stack(app, client, client.get("/v1/models").json()["data"][0]["id"])


def session_at(name: str, tag: str) -> str:
    """An id whose engine is ``name``."""
    keys = (f"{tag}-{number}" for number in range(1000))
    return next(key for key in keys if ranked(key, dict.fromkeys(NAMES, 1.0))[0] == name)


def history(count: int, tag: str) -> list[dict[str, Any]]:
    """A history that shares no token with another one's but what the template begins with."""
    messages = agent_history(count, f"Look into {tag}.", secret="key=7391", lines=12)
    messages[0] = {"role": "system", "content": f"{tag}: you look into folders."}
    return messages


def grown(before: Series, after: Series, name: str, label: str) -> dict[str, float]:
    """Return the growth of a counter, by one label."""
    found: dict[str, float] = {}
    for (series, labels), value in after.items():
        if series == name:
            more = value - before.get((series, labels), 0.0)
            key = dict(labels)[label]
            if more:
                found[key] = found.get(key, 0.0) + more
    return found


def busts(before: Series, after: Series) -> dict[str, float]:
    """Lost tokens by cause."""
    return grown(before, after, "leyline_cache_bust_tokens_total", "cause")


def edited(count: int, tag: str, at: int = 3) -> list[dict[str, Any]]:
    """The history with an old result rewritten by the caller."""
    messages = history(count, tag)
    messages[at] = {**messages[at], "content": "nothing there"}
    return messages


def test_a_session_that_only_grows_loses_nothing(two: Stack) -> None:
    """It has neither busts nor discrepancies, and every prompt token is cached or new."""
    before = two.series()
    session = session_at("a", "grows")
    for turn in range(1, TURNS):
        two.ask(session, history(turn, "grows"))
    after = two.series()
    assert busts(before, after) == {}
    assert grown(before, after, "leyline_cache_discrepancy_tokens_total", "direction") == {}
    told = grown(before, after, "leyline_upstream_prompt_tokens_total", "upstream")
    assert set(told) == {"a"}
    assert grown(before, after, "leyline_completion_tokens_total", "tenant") == {
        "default": 2.0 * (TURNS - 1)
    }
    assert grown(before, after, "leyline_upstream_turns_total", "upstream") == {"a": TURNS - 1.0}


@pytest.mark.parametrize(
    ("cause", "last"),
    [
        ("undeclared", {"messages": edited(TURNS, "undeclared")}),
        ("tools", {"tools": [LIST_TOOL]}),
        ("policy", {"leyline": {"policy": REDACT}}),
        (
            "declared",
            {
                "leyline": {
                    "edits": [
                        {"message": 3, "mode": "forget", "drop": False, "replacement": "gone"}
                    ]
                }
            },
        ),
    ],
)
def test_each_edit_is_counted_under_its_cause(two: Stack, cause: str, last: dict[str, Any]) -> None:
    """Text that an exact or forgetting edit cuts is lost to it alone, as many tokens as the engine
    prefilled beyond the new ones."""
    session = session_at("a", cause)
    for turn in range(1, TURNS):
        two.ask(session, history(turn, cause))
    before = two.series()
    answer = two.ask(session, **{"messages": history(TURNS, cause), **last})
    after = two.series()
    lost = busts(before, after)
    tokens = answer["leyline"]["tokens"]
    assert set(lost) == {cause}, answer["leyline"]
    assert tokens["prompt"] // 3 < lost[cause] < tokens["prefilled"]
    assert grown(before, after, "leyline_cache_busts_total", "cause") == {cause: 1.0}
    assert not grown(before, after, "leyline_cache_discrepancy_tokens_total", "direction")


def test_what_is_spliced_is_no_loss(two: Stack) -> None:
    """The same edit, allowed to be spliced, avoids prefill instead; counted with its lineage and
    its directive."""
    session = session_at("a", "spliced")
    for turn in range(1, TURNS):
        two.ask(session, history(turn, "spliced"))
    before = two.series()
    allowed = {"undeclared": {"tool": "amortize"}}
    answer = two.ask(session, edited(TURNS, "spliced"), leyline=allowed)
    after = two.series()
    tokens = answer["leyline"]["tokens"]
    assert tokens["spliced"] > tokens["prompt"] // 3
    assert busts(before, after) == {}
    assert grown(before, after, "leyline_prefill_avoided_tokens_total", "tenant") == {
        "default": tokens["spliced"]
    }
    assert grown(before, after, "leyline_lineages_total", "tenant") == {"default": 1.0}
    assert grown(before, after, "leyline_directives_total", "reason") == {"spliced": 1.0}
    assert not grown(before, after, "leyline_cache_discrepancy_tokens_total", "direction")
    two.ask(session, edited(TURNS + 1, "spliced"), leyline=allowed)
    assert grown(after, two.series(), "leyline_lineages_total", "tenant") == {}


def test_a_boundary_is_lost_to_the_edit(two: Stack) -> None:
    """Tokens after a spliced edit that the caller wants computed again are its price."""
    session = session_at("a", "boundary")
    for turn in range(1, TURNS):
        two.ask(session, history(turn, "boundary"))
    before = two.series()
    options = {"undeclared": {"tool": "amortize"}, "boundary": 100}
    answer = two.ask(session, edited(TURNS, "boundary"), leyline=options)
    assert answer["leyline"]["outcome"] == "spliced"
    assert busts(before, two.series()) == {"undeclared": 100.0}


def test_a_session_that_moves_loses_its_cache_to_the_failover(two: Stack) -> None:
    """Served by the other engine, all that the first one had is prefilled again; the proxy
    expected that, so that there is no discrepancy."""
    session = session_at("a", "moves")
    for turn in range(1, TURNS):
        two.ask(session, history(turn, "moves"))
    before = two.series()
    two.drain("a", True)
    try:
        answer = two.ask(session, history(TURNS, "moves"))
    finally:
        two.drain("a", False)
    after = two.series()
    lost = busts(before, after)
    tokens = answer["leyline"]["tokens"]
    assert set(lost) == {"failover"}
    assert tokens["prompt"] // 3 < lost["failover"] <= tokens["prefilled"]
    assert not grown(before, after, "leyline_cache_discrepancy_tokens_total", "direction")


def test_what_the_engine_evicted_is_lost_to_it_and_missing(two: Stack) -> None:
    """Other sessions that fill the pool cost this one its cache without any edit; busts and
    discrepancy give the same number."""
    session = session_at("a", "evicted")
    for turn in range(1, TURNS):
        two.ask(session, history(turn, "evicted"))
    for other in range(4):
        two.ask(session_at("a", f"flood{other}"), history(3 * TURNS, f"flood{other}"))
    before = two.series()
    answer = two.ask(session, history(TURNS, "evicted"))
    after = two.series()
    lost = busts(before, after)
    tokens = answer["leyline"]["tokens"]
    assert set(lost) == {"engine"}, tokens
    assert tokens["prompt"] // 3 < lost["engine"] <= tokens["prefilled"]
    missing = grown(before, after, "leyline_cache_discrepancy_tokens_total", "direction")
    assert missing == {"lost": lost["engine"]}


def test_what_a_template_moves_is_lost_to_it(tmp_path: Path) -> None:
    """A template that renders old messages otherwise than new ones cuts the cache on every turn."""
    model = tmp_path / "model"
    shutil.copytree(Path(str(trained.__file__)).parent / "plain", model)
    template = model / "chat_template.jinja"
    text = template.read_text(encoding="utf-8")
    opening = "{%- for message in messages -%}"
    assert text.count(opening) == 1
    template.write_text(text.replace(opening, opening + LATE_MARK), encoding="utf-8")
    with ExitStack() as stack:
        app = create_app(Settings(upstream=start(stack, model=str(model)), log_level="error"))
        origin = stack.enter_context(serving(app))
        client = stack.enter_context(httpx.Client(base_url=origin, timeout=60))
        alone = Stack(app, client, client.get("/v1/models").json()["data"][0]["id"])
        for turn in range(1, 4):
            alone.ask("s", history(turn, "template"))
        before = alone.series()
        alone.ask("s", history(4, "template"))
        assert set(busts(before, alone.series())) == {"template"}


def test_no_label_tells_of_a_request(two: Stack) -> None:
    """No label of any series is a session's name, prompt text or the id of a message."""
    text = json.dumps([labels for _, labels in two.series()])
    for word in ("grows", "undeclared-", "Look into", "key=7391", "m-"):
        assert word not in text
