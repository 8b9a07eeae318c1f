"""The conversation that a request belongs to, shown by what the engine then copies for it.

A splice draws on a turn that the session retains, so it proves whose turn that was: after a tool
result is cut, the same request splices in its own conversation and nowhere else. A harness may cut
it by itself in a session that has a certain name; in any other only a policy may, to which the
caller still shows what it cuts.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import httpx
import pytest
from support.stack import embedded_stack

from leyline_proxy.model.history import HARNESS_HEADERS, OWN_HEADER

CHAT = "/v1/chat/completions"
Conversation = list[dict[str, Any]]
Account = dict[str, Any]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """A bare HTTP client of a whole stack."""
    options = {"pool_tokens": 131_072, "device": "cpu"}
    settings = {"log_level": "error", "undeclared": {"tool": "amortize"}}
    with (
        embedded_stack(options, **settings) as origin,
        httpx.Client(base_url=origin, timeout=60) as http,
    ):
        yield http


def ask(client: httpx.Client, messages: Conversation, **named: Any) -> Account:
    """The account of a turn; ``named`` are headers (with a dash) or members of the body."""
    headers = named.pop("headers", {})
    body = {"model": "leyline-recall", "messages": messages, "max_tokens": 2, "temperature": 0}
    answer = client.post(CHAT, json=body | {"ignore_eos": True} | named, headers=headers)
    assert answer.status_code == 200, answer.text
    account: Account = answer.json()["leyline"]
    return account


def lines(name: str) -> str:
    """A tool's result."""
    return " ".join(f"{name} line {number} of the listing" for number in range(6))


def talk(task: str, *results: str, cut: bool = False) -> Conversation:
    """A conversation with a tool result per round; ``cut`` shortens the first, as harnesses do."""
    messages: Conversation = [
        {"role": "system", "content": "You are an agent that looks into folders. " * 3},
        {"role": "user", "content": f"Task {task}."},
    ]
    for number, text in enumerate(results):
        call = {"name": "shell", "arguments": '{"command": "ls"}'}
        calls = [{"id": f"c{number}", "type": "function", "function": call}]
        messages.append({"role": "assistant", "content": f"Look {text}.", "tool_calls": calls})
        content = "[cut]" if cut and number == 0 else lines(text)
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": content})
    return messages


BY_POLICY: dict[str, Any] = {"leyline": {"policy": "truncate_older_than:n=1,max_chars=8"}}


def draws_on_its_past(account: Account) -> bool:
    """Return True if the turn was spliced out of a retained one; check from where on that shows."""
    spliced = bool(account["outcome"] == "spliced" and account["tokens"]["spliced"] > 0)
    assert not spliced or 0 < account["lineage"]["from"] < account["tokens"]["prompt"]
    return spliced


def is_exact_for_want_of_a_name(account: Account) -> bool:
    """Return True if the caller's own edit was prefilled although its role is mapped."""
    assert account["tokens"]["spliced"] == 0 and account["lineage"] is None
    return (account["outcome"], account["reason"]) == ("reprefilled", "unnamed_session")


def own_and_others(client: httpx.Client, task: str, own: Any, other: Any) -> tuple[Account, ...]:
    """A conversation under one name; its cut, first under that name and then under another."""
    first = ask(client, talk(task, "a", "b"), **own)
    mine = ask(client, talk(task, "a", "b", "c", cut=True), **own)
    stranger = ask(client, talk(task, "a", "b", "c", cut=True), **other)
    return first, stranger, mine


@pytest.mark.parametrize("header", [OWN_HEADER, *HARNESS_HEADERS])
def test_the_harness_own_session_header(client: httpx.Client, header: str) -> None:
    """The same name is the same session, another name another one with no sources."""
    named = [{"headers": {header: f"{header}-{number}"}} for number in range(2)]
    first, stranger, mine = own_and_others(client, header, *named)
    assert first["session"] == mine["session"] == f"{header}-0"
    assert draws_on_its_past(mine)
    assert stranger["tokens"]["spliced"] == 0 == stranger["turn_index"]


def test_sub_agents_of_claude_code_are_sessions_of_their_own(client: httpx.Client) -> None:
    """Two with the same task under one session keep apart, and each splices its own past."""
    of_session = {"x-claude-code-session-id": "claude"}
    found = {}
    for agent in ("", "one", "two"):
        headers = {**of_session, **({"x-claude-code-agent-id": agent} if agent else {})}
        ask(client, talk("alike", "a", "b"), headers=headers)
        found[agent] = ask(client, talk("alike", "a", "b", "c", cut=True), headers=headers)
    names = [account["session"] for account in found.values()]
    assert names == ["claude", "claude:agent:one", "claude:agent:two"]
    assert all(account["turn_index"] == 1 for account in found.values())
    assert all(map(draws_on_its_past, found.values()))


def test_metadata(client: httpx.Client) -> None:
    """``metadata.session_id`` names a session as a header does."""
    named = [{"metadata": {"session_id": f"meta-{number}"}} for number in range(2)]
    first, stranger, mine = own_and_others(client, "metadata", *named)
    assert first["session"] == mine["session"] == "meta-0"
    assert draws_on_its_past(mine)
    assert stranger["tokens"]["spliced"] == 0 == stranger["turn_index"]


@pytest.mark.parametrize("field", ["prompt_cache_key", "user"])
def test_names_that_conversations_share(client: httpx.Client, field: str) -> None:
    """Under one name each conversation has its own sources; under another name it has none."""
    first = ask(client, talk(field, "a", "b"), **{field: "one"})
    mine = ask(client, talk(field, "a", "b", "c"), **{field: "one"}, **BY_POLICY)
    stranger = ask(client, talk(field, "a", "b", "c"), **{field: "two"}, **BY_POLICY)
    assert draws_on_its_past(mine) and first["session"] == mine["session"]
    assert stranger["tokens"]["spliced"] == 0
    assert stranger["session"] != first["session"]
    other = ask(client, talk(f"{field} else", "a", "b"), **{field: "one"})
    assert other["session"] != first["session"]
    cut = ask(client, talk(f"{field} else", "a", "b", "c"), **{field: "one"}, **BY_POLICY)
    assert draws_on_its_past(cut) and cut["session"] == other["session"]
    own = ask(client, talk(f"{field} else", "a", "b", "c", "d", cut=True), **{field: "one"})
    assert is_exact_for_want_of_a_name(own) and own["session"] == other["session"]


def test_the_hash_chain(client: httpx.Client) -> None:
    """Without any name, the stored conversation that the list continues is the session."""
    first = ask(client, talk("chain", "a", "b"))
    longer = ask(client, talk("chain", "a", "b", "c"))
    cut = ask(client, talk("chain", "a", "b", "c", "d"), **BY_POLICY)
    assert first["session"] == longer["session"] == cut["session"]
    assert draws_on_its_past(cut)
    own = ask(client, talk("chain", "a", "b", "c", "d", "e", cut=True))
    assert is_exact_for_want_of_a_name(own) and own["session"] == first["session"]
    assert "x-leyline-session" in own["detail"]
    stranger = ask(client, talk("another chain", "a", "b", "c", "d"), **BY_POLICY)
    assert stranger["session"] != first["session"]
    assert stranger["tokens"]["spliced"] == 0
    answer = talk("chain", "a", "b", "c", "d", "e")
    answer[2]["content"] = "Look elsewhere."
    uncertain = ask(client, answer)
    assert uncertain["session"] != first["session"], "the first answer is another"
    assert uncertain["tokens"]["spliced"] == 0


def test_a_prefix_that_was_spliced_says_so_on_every_turn(client: httpx.Client) -> None:
    """It says so even on turns that edit nothing; not in a conversation in which nothing was
    spliced."""
    named: dict[str, Any] = {"headers": {OWN_HEADER: "marked"}}
    assert ask(client, talk("marked", "a", "b"), **named)["lineage"] is None
    cut = ask(client, talk("marked", "a", "b", "c", cut=True), **named)
    assert draws_on_its_past(cut)
    later = ask(client, talk("marked", "a", "b", "c", "d", cut=True), **named)
    assert (later["tokens"]["spliced"], later["lineage"]) == (0, cut["lineage"])
    assert later["tokens"]["prefix"] > cut["lineage"]["from"]
    fresh = ask(client, talk("marked", "a", "b", "c", "d", cut=True))
    assert fresh["lineage"] is None


def test_a_session_may_take_the_id_that_it_was_given_for_its_name(client: httpx.Client) -> None:
    """From the turn after that on it is certain, and found by its messages alone no more."""
    first = ask(client, talk("adopted", "a", "b"))
    named: dict[str, Any] = {"headers": {OWN_HEADER: first["session"]}}
    unsure = ask(client, talk("adopted", "a", "b", "c", cut=True), **named)
    drawn = (unsure["tokens"]["spliced"], unsure["lineage"])
    assert (unsure["session"], *drawn) == (first["session"], 0, None)
    sure = talk("adopted", "a", "b", "c", "d", cut=True)
    sure[5]["content"] = "[cut]"
    assert draws_on_its_past(ask(client, sure, **named))
    stranger = ask(client, [*sure, {"role": "user", "content": "And now?"}])
    assert stranger["session"] != first["session"] and stranger["lineage"] is None


def test_two_concurrent_requests_of_one_session(client: httpx.Client) -> None:
    """Both are answered, both are retained, and each one's continuation draws on its own."""
    named: dict[str, Any] = {"headers": {OWN_HEADER: "concurrent"}}
    ask(client, talk("both", "a"), **named)
    branches = [talk("both", "a", name, "end") for name in ("left", "right")]
    with ThreadPoolExecutor(2) as pool:
        accounts = list(pool.map(lambda messages: ask(client, messages, **named), branches))
    assert len({account["turn"] for account in accounts}) == 2
    document = client.get("/v1/leyline/sessions/concurrent").json()
    assert {account["turn"] for account in accounts} <= set(document["retained"])
    assert sorted(turn["index"] for turn in document["history"]) == [0, 1, 2]
    for name in ("left", "right"):
        account = ask(client, talk("both", "a", name, "end", "more", cut=True), **named)
        assert draws_on_its_past(account)
        again = ask(client, talk("both", "a", name, "end", "more", "on", cut=True), **named)
        assert again["tokens"]["prefix"] >= account["tokens"]["prompt"] - 8


def test_regenerate(client: httpx.Client) -> None:
    """The same list again belongs to the session that sent it, and changes nothing for it."""
    messages = talk("regenerate", "a", "b")
    first = ask(client, messages)
    again = ask(client, messages)
    assert again["session"] == first["session"]
    assert (again["edits"], again["tokens"]["spliced"]) == ([], 0)
    assert again["tokens"]["prefix"] == again["tokens"]["prompt"] - 1


def test_branch(client: httpx.Client) -> None:
    """A list that leaves the stored one is its own conversation unless more than that is shared."""
    named: dict[str, Any] = {"headers": {OWN_HEADER: "branch"}}
    first = ask(client, talk("branch", "a", "b"), **named)
    branched = ask(client, talk("branch", "a", "x"), **named)
    assert branched["session"] == first["session"]
    assert branched["tokens"]["spliced"] == 0
    shared = ask(client, talk("branch", "a"), headers={OWN_HEADER: "branch-size"})["tokens"]
    assert branched["tokens"]["prefix"] >= shared["prompt"] - 8
    for name in ("b", "x"):
        account = ask(client, talk("branch", "a", name, "end", cut=True), **named)
        assert draws_on_its_past(account), "each branch is a source of its own"


def test_restart_from_scratch(client: httpx.Client) -> None:
    """The opening alone is a new conversation: without a name a new session, never with sources."""
    first = ask(client, talk("scratch", "a", "b"))
    restarted = ask(client, talk("scratch"))
    assert restarted["session"] != first["session"]
    named: dict[str, Any] = {"headers": {OWN_HEADER: "scratch"}}
    ask(client, talk("named scratch", "a", "b"), **named)
    account = ask(client, talk("named scratch"), **named)
    assert (account["outcome"], account["tokens"]["spliced"], account["edits"]) == (
        "unedited",
        0,
        [],
    )


def test_the_history_of_another_user_with_the_same_opening(client: httpx.Client) -> None:
    """Two users with one opening and one first answer each continue their own turns alone."""
    users = {name: talk("opening", "a", name) for name in ("mine", "yours")}
    sessions = {name: ask(client, messages)["session"] for name, messages in users.items()}
    assert len(set(sessions.values())) == 2
    for name in users:
        messages = talk("opening", "a", name, "more")
        messages[5]["content"] = "[cut]"
        account = ask(client, messages)
        # The text that both have is not enough, and the cut text was their only difference.
        assert account["session"] not in set(sessions.values()) - {sessions[name]}
        longer = ask(client, talk("opening", "a", name, "end"))
        assert longer["session"] == sessions[name]
        assert longer["tokens"]["spliced"] == 0


@pytest.mark.parametrize("header", HARNESS_HEADERS)
def test_conversations_beside_the_one_that_took_the_name(client: httpx.Client, header: str) -> None:
    """A harness gives one name to an agent, to those it sends out and to a request for a title:
    each is a session of its own that finds its own KV, and none counts as an edit of another."""
    named: dict[str, Any] = {"headers": {header: f"{header}-beside"}}
    title = [
        {"role": "system", "content": "You give titles to conversations."},
        {"role": "user", "content": "Give a title."},
        {"role": "user", "content": f"{header} main"},
    ]
    main = [ask(client, talk(f"{header} main"), **named)]
    beside = [ask(client, title, **named)]
    for count in range(3):
        sent = [f"far {number}" for number in range(count)]
        beside.append(ask(client, talk(f"{header} sent out", *sent), **named))
        near = [f"near {number}" for number in range(count + 1)]
        main.append(ask(client, talk(f"{header} main", *near), **named))
    assert {account["session"] for account in main} == {f"{header}-beside"}
    sent_out = {account["session"] for account in beside[1:]}
    assert len(sent_out) == 1
    assert not sent_out & {f"{header}-beside", beside[0]["session"]}
    assert beside[0]["session"] != f"{header}-beside"
    assert not any(account["edits"] for account in beside)
    for account in (*main[1:], *beside[2:]):
        assert account["tokens"]["prefix"] > 0
    more = talk(f"{header} sent out", "far 0", "far 1", "far 2")
    cut = ask(client, more, **named, **BY_POLICY)
    assert draws_on_its_past(cut) and {cut["session"]} == sent_out


def test_what_lies_beside_a_name_has_no_certain_one(client: httpx.Client) -> None:
    """A harness's own cuts are spliced in the conversation that took its name, and in no other: two
    that it sends out with one task are distinguished by likeness alone."""
    named: dict[str, Any] = {"headers": {HARNESS_HEADERS[0]: "own cuts"}}
    for task, certain in (("first", True), ("sent out", False)):
        results = [f"{task} {number}" for number in range(3)]
        before = ask(client, talk(task, *results[:2]), **named)
        own = ask(client, talk(task, *results, cut=True), **named)
        assert own["session"] == before["session"]
        assert draws_on_its_past(own) if certain else is_exact_for_want_of_a_name(own)


def test_the_first_conversation_takes_the_name_also_while_its_turn_runs(
    client: httpx.Client,
) -> None:
    """A request for a title that comes beside the first turn isn't taken for a part of it."""
    named: dict[str, Any] = {"headers": {HARNESS_HEADERS[0]: "at-once"}}
    requests = [talk(f"At once {number}", "a") for number in range(4)]
    together = Barrier(4)

    def at_once(messages: Conversation) -> Account:
        together.wait(60)
        # Long enough that all come while the first one runs.
        return ask(client, messages, max_tokens=100, **named)

    with ThreadPoolExecutor(4) as pool:
        accounts = list(pool.map(at_once, requests))
    assert len({account["session"] for account in accounts}) == 4
    assert "at-once" in {account["session"] for account in accounts}
    again = [
        ask(client, talk(f"At once {number}", "a", "b"), **named)["session"] for number in range(4)
    ]
    assert again == [account["session"] for account in accounts]
