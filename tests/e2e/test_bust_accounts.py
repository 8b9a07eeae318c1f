"""The cost of a turn: every lost token with its cause, reconciled with the engine's counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from support.agent_history import agent_history
from support.bust_accounts import causes, check
from support.stack import embedded_stack

TURNS = 6
POOL = 6144
REDACT = r"redact:pattern='key=\d+',replacement='[gone]'"
AMORTIZED = {"undeclared": {"tool": "amortize"}}
PRICES = {"default": {"currency": "EUR", "prefilled": 2.0, "cached": 0.5, "generated": 10.0}}
Chat = list[dict[str, Any]]


@dataclass
class Proxy:
    """A proxy before an engine, and its model."""

    http: httpx.Client
    model: str

    def ask(
        self, session: str, messages: Chat, *, stream: bool = False, **members: Any
    ) -> dict[str, Any]:
        """The account of a turn; its figures agree with one another and with the engine's."""
        body = {"model": self.model, "messages": messages, "max_tokens": 2, "stream": stream}
        answer = self.http.post(
            "/v1/chat/completions",
            json=body | {"temperature": 0, "ignore_eos": True, **members},
            headers={"x-leyline-session": session},
        )
        assert answer.status_code == 200, answer.text
        account = last_account(answer.text) if stream else answer.json()["leyline"]
        check(account)
        history = self.http.get(f"/v1/leyline/sessions/{session}").json()["history"]
        if "entries" in account.get("busts", {}):
            assert history[-1]["busts"] == account["busts"]
        found: dict[str, Any] = account
        return found

    def grow(self, session: str, turns: int = TURNS, **members: Any) -> None:
        """A session that only grows."""
        for turn in range(1, turns):
            self.ask(session, chat(turn, session), **members)


def last_account(text: str) -> Any:
    """The account in the chunk of a stream that has one."""
    (line,) = [line for line in text.splitlines() if '"leyline"' in line]
    return json.loads(line.removeprefix("data: "))["leyline"]


def chat(count: int, tag: str) -> Chat:
    """A history that shares no token with another one's but what the template begins with."""
    messages = agent_history(count, f"Look into {tag}.", secret="key=7391", lines=12)
    messages[0] = {"role": "system", "content": f"{tag}: you look into folders."}
    return messages


def edited(count: int, tag: str, at: int = 3) -> Chat:
    """The history with an old result rewritten by the caller."""
    messages = chat(count, tag)
    messages[at] = {**messages[at], "content": "nothing there"}
    return messages


@contextmanager
def proxied(options: dict[str, Any], **settings: Any) -> Iterator[Proxy]:
    """A proxy before the replay engine."""
    options = {"device": "cpu", "pool_tokens": POOL, **options}
    with (
        embedded_stack(options, log_level="error", **settings) as origin,
        httpx.Client(base_url=origin, timeout=60) as http,
    ):
        yield Proxy(http, http.get("/v1/models").json()["data"][0]["id"])


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    """A proxy with a price table."""
    with proxied({}, prices=PRICES) as found:
        yield found


@pytest.fixture(scope="module")
def paged() -> Iterator[Proxy]:
    """A proxy before an engine with pages of 16 tokens, without prices."""
    with proxied({"page_tokens": 16}) as found:
        yield found


def test_a_session_that_only_grows_pays_for_new_tokens_only(proxy: Proxy) -> None:
    """Its first turn has nothing to compare with; each later one names the turn before it."""
    first = proxy.ask("grows", chat(1, "grows"))
    assert first["busts"]["compared_with"] is None
    for turn in range(2, TURNS):
        later = proxy.ask("grows", chat(turn, "grows"))
        assert later["busts"]["compared_with"] == first["turn"]
        assert (later["busts"]["lost_tokens"], later["busts"]["entries"]) == (0, [])
        first = later


@pytest.mark.parametrize(
    ("cause", "mode", "last"),
    [
        ("undeclared", "exact", {}),
        ("policy:redact", "forget", {"leyline": {"policy": REDACT}}),
        (
            "declared",
            "forget",
            {"leyline": {"edits": [{"message": 3, "mode": "forget", "replacement": "gone"}]}},
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_edit_pays_for_all_after_it(
    proxy: Proxy, cause: str, mode: str, last: dict[str, Any], stream: bool
) -> None:
    """The entry names the message with its role and tool, who changed it, and which messages were
    prefilled again; prices are the difference to cached tokens."""
    tag = f"{cause.partition(':')[0]}-{stream}"
    proxy.grow(tag)
    messages = chat(TURNS, tag) if last else edited(TURNS, tag)
    account = proxy.ask(tag, messages, stream=stream, **last)
    (entry,) = account["busts"]["entries"]
    named = (entry["cause"], entry["mode"], entry["message"], entry["role"], entry["tool"])
    assert named == (cause, mode, 3, "tool", "shell")
    assert entry["why"] == mode
    assert entry["messages"][1] == len(chat(TURNS - 1, tag)) - 1
    assert account["tokens"]["prompt"] // 3 < entry["tokens"] < account["tokens"]["prefilled"]
    assert entry["money"] == pytest.approx(entry["tokens"] * 1.5e-6)
    assert account["busts"]["money"]["lost"] == pytest.approx(entry["money"])


def test_what_is_computed_again_beside_a_splice_is_each_edits_own(proxy: Proxy) -> None:
    """Of two spliced edits with a boundary, each is to blame for its own."""
    proxy.grow("boundary")
    messages = edited(TURNS, "boundary")
    messages[7] = {**messages[7], "content": "nothing here"}
    account = proxy.ask("boundary", messages, leyline={**AMORTIZED, "boundary": 20})
    assert account["outcome"] == "spliced"
    found = [(each["message"], each["tokens"], each["why"]) for each in account["busts"]["entries"]]
    assert found == [(3, 20, "computed_again"), (7, 20, "computed_again")]


def test_the_engine_is_to_blame_for_what_it_evicted(proxy: Proxy) -> None:
    """Without an edit, what other sessions drove out of the pool is the engine's own loss."""
    proxy.grow("evicted")
    for other in range(4):
        proxy.ask(f"flood{other}", chat(3 * TURNS, f"flood{other}"))
    account = proxy.ask("evicted", chat(TURNS, "evicted"))
    assert set(causes(account)) == {"engine"}
    (entry,) = account["busts"]["entries"]
    assert (entry["message"], entry["mode"], entry["messages"][0]) == (None, None, 0)
    assert account["tokens"]["prompt"] // 3 < entry["tokens"]


def test_partial_pages_are_named(paged: Proxy) -> None:
    """An engine caches whole pages; the rest of the last one is lost to nothing else."""
    held = 0
    losses = []
    for turn in range(1, TURNS + 4):
        account = paged.ask("pages", chat(turn, "pages"))
        lost = causes(account)
        assert lost == ({"page": held % 16} if held % 16 else {})
        assert "money" not in account["busts"]
        losses.append(sum(lost.values()))
        held = account["tokens"]["prompt"]
    assert any(losses)
    account = paged.ask("pages", edited(TURNS + 4, "pages"))
    lost = causes(account)
    assert set(lost) == {"undeclared", "page"} and 0 < lost["page"] < 16


def test_a_new_id_costs_what_the_old_one_had_spliced(proxy: Proxy) -> None:
    """The exact prefix is found under any id; spliced KV is the old session's own."""
    proxy.grow("old")
    same = proxy.ask("copy", chat(TURNS, "old"))
    assert causes(same) == {}
    proxy.ask("old", edited(TURNS, "old"), leyline=AMORTIZED)
    account = proxy.ask("new", edited(TURNS + 1, "old"), leyline=AMORTIZED)
    lost = causes(account)
    assert set(lost) == {"session"} and lost["session"] > account["tokens"]["prompt"] // 3
    assert account["busts"]["new_tokens"] < account["tokens"]["prompt"] // 3
    later = proxy.ask("new", edited(TURNS + 2, "old"), leyline=AMORTIZED)
    assert causes(later) == {}
    other = proxy.ask("newer", chat(1, "another"))
    assert other["busts"]["compared_with"] is None


def test_time_is_unknown_until_a_stream_shows_it() -> None:
    """Speed is measured on this engine's own streamed turns: before, the account leaves it open."""
    with proxied({}) as fresh:
        fresh.grow("slow", 4)
        unknown = fresh.ask("slow", edited(4, "slow"))["busts"]
        assert unknown["lost_tokens"] > 0
        assert unknown["lost_seconds"] is unknown["entries"][0]["seconds"] is None
        messages = edited(5, "slow")
        messages[3]["content"] = "and now something else"
        known = fresh.ask("slow", messages, stream=True)["busts"]
        assert known["prefill_us_per_token"] > 0
        expected = known["lost_tokens"] * known["prefill_us_per_token"] / 1e6
        assert known["lost_seconds"] == pytest.approx(expected) and expected > 0


def test_a_request_chooses_how_much_it_gets(proxy: Proxy) -> None:
    """Entries by default, sums alone, or nothing; another word is refused by name."""
    proxy.grow("chooses", 4)
    sums = proxy.ask("chooses", edited(4, "chooses"), leyline={"busts": "sums"})["busts"]
    assert sums["lost_tokens"] > 0 and "entries" not in sums
    assert "busts" not in proxy.ask("chooses", chat(4, "chooses"), leyline={"busts": "off"})
    body = {"model": proxy.model, "messages": chat(1, "x"), "leyline": {"busts": "some"}}
    refused = proxy.http.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "leyline.busts"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["messages", "responses"])
def test_the_other_apis_carry_the_same_account(proxy: Proxy, api: str, stream: bool) -> None:
    """An answer of the Messages or Responses API has the member where it has ``leyline``."""
    session = f"{api}-{stream}"
    accounts = []
    for text in (f"{session}: name the folders. " * 9, f"{session}: name the drawers. " * 9):
        talk = [
            {"role": "user", "content": text},
            {"role": "assistant", "content": "A list of names, and a map. " * 9},
            {"role": "user", "content": "Go on."},
        ]
        body: dict[str, Any] = {"model": proxy.model, "stream": stream}
        body |= (
            {"messages": talk, "max_tokens": 2}
            if api == "messages"
            else {"input": talk, "max_output_tokens": 16}
        )
        answer = proxy.http.post(f"/v1/{api}", json=body, headers={"x-leyline-session": session})
        assert answer.status_code == 200, answer.text
        accounts.append(account_in(answer.text) if stream else answer.json()["leyline"])
        check(accounts[-1])
    (entry,) = accounts[-1]["busts"]["entries"]
    assert (entry["cause"], entry["message"], entry["role"]) == ("undeclared", 0, "user")


def account_in(text: str) -> Any:
    """The one account in the events of a stream, wherever the API has it."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if '"leyline"' in line]
    event = json.loads(lines[-1])
    return event["leyline"] if "leyline" in event else event["response"]["leyline"]
