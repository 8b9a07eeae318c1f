"""Agents do more with a history than continue it: branch, regenerate, send a part, start again.

Counts are the engine's own, from the receipts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.stack import embedded_stack

CHAT = "/v1/chat/completions"
Conversation = list[dict[str, Any]]
AMORTIZE = {"user": "amortize", "assistant": "amortize", "tool": "amortize"}
SLACK = 8
"""Tokens around a content: role marks, the end of a turn."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "shell",
            "description": "Runs a command in the folder of the task.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """A bare HTTP client of a whole stack."""
    options = {"pool_tokens": 65_536, "device": "cpu"}
    with (
        embedded_stack(options, log_level="error") as origin,
        httpx.Client(base_url=origin, timeout=60) as http,
    ):
        yield http


class Talk:
    """One session."""

    def __init__(self, client: httpx.Client, session: str) -> None:
        self._client, self._session = client, session
        self._model = client.get("/v1/models").json()["data"][0]["id"]

    def ask(
        self, messages: Conversation, *, tools: list[dict[str, Any]] | None = None, **options: Any
    ) -> dict[str, Any]:
        """The account of a turn."""
        body = {"model": self._model, "messages": messages, "max_tokens": 1, "temperature": 0}
        body |= {"ignore_eos": True, "leyline": options} | ({"tools": tools} if tools else {})
        answer = self._client.post(CHAT, json=body, headers={"x-leyline-session": self._session})
        assert answer.status_code == 200, answer.text
        account: dict[str, Any] = answer.json()["leyline"]
        tokens = account["tokens"]
        assert tokens["prompt"] == tokens["prefix"] + tokens["spliced"] + tokens["prefilled"]
        return account

    def size(self, text: str) -> int:
        """Tokens of a text, by what it adds to a prompt; role marks included."""
        probe = Talk(self._client, f"{self._session}-size")
        bare, full = (
            probe.ask([{"role": "user", "content": "x"}, *more])["tokens"]["prompt"]
            for more in ([], [{"role": "user", "content": text}])
        )
        return int(full - bare)


def text(name: str) -> str:
    """Some length of words that only ``name`` has."""
    return " ".join(f"{name} has word {name}{number} here" for number in range(9))


def opening(name: str) -> Conversation:
    """A system prompt and a task."""
    return [
        {"role": "system", "content": "You are an agent that looks into folders. " * 4},
        {"role": "user", "content": f"Task {name}. {text(f'task{name}')}"},
    ]


def rounds(*names: str) -> Conversation:
    """Answers and the questions after them."""
    messages: Conversation = []
    for name in names:
        messages.append({"role": "assistant", "content": text(f"answer{name}")})
        messages.append({"role": "user", "content": text(f"question{name}")})
    return messages


def test_a_branch_and_the_return_from_it(client: httpx.Client) -> None:
    """Two turns back and on another way, then on along the first: each finds all it had."""
    talk, start = Talk(client, "branch"), opening("branch")
    sizes = [talk.ask([*start, *rounds(*"abc"[:count])])["tokens"]["prompt"] for count in range(4)]
    branched = talk.ask([*start, *rounds("a", "x")])["tokens"]
    assert sizes[1] - SLACK <= branched["prefix"] <= sizes[1] + SLACK
    further = talk.ask([*start, *rounds("a", "x", "y")])["tokens"]
    assert further["prefix"] >= branched["prompt"] - SLACK
    returned = talk.ask([*start, *rounds("a", "b", "c", "d")])
    assert returned["tokens"]["prefix"] >= sizes[3] - SLACK
    assert (returned["outcome"], returned["edits"]) == ("unedited", [])


def test_a_branch_off_a_splice_and_the_return_from_it(client: httpx.Client) -> None:
    """Spliced KV is found again by the branch that it belongs to, and by no other."""
    talk, start = Talk(client, "spliced-branch"), opening("spliced")
    talk.ask([*start, *rounds("a", "b")])
    shorter = [dict(m) for m in [*start, *rounds("a", "b")]]
    shorter[2]["content"] = "[cut]"
    spliced = talk.ask([*shorter, *rounds("c")], undeclared=AMORTIZE)["tokens"]
    assert spliced["spliced"] > 0
    other = talk.ask([*start, *rounds("a", "b", "x")])["tokens"]
    assert (other["spliced"], other["prefix"] > spliced["prefix"]) == (0, True)
    back = talk.ask([*shorter, *rounds("c", "d")])["tokens"]
    assert back["spliced"] == 0
    assert back["prefix"] >= spliced["prompt"] - SLACK, "under its own lineage, without a copy"


def test_regenerating_finds_the_whole_prompt(client: httpx.Client) -> None:
    """The same request is a prefix hit up to the token whose logits are needed."""
    talk, messages = Talk(client, "again"), [*opening("again"), *rounds("a")]
    talk.ask(messages)
    for _ in range(3):
        account = talk.ask(messages)
        tokens = account["tokens"]
        assert (tokens["prefix"], tokens["spliced"]) == (tokens["prompt"] - 1, 0)
        assert account["edits"] == []


def test_a_part_sent_again_is_spliced(client: httpx.Client) -> None:
    """The first messages and the last ones, the middle left out: the end is copied."""
    talk, messages = Talk(client, "part"), [*opening("part"), *rounds(*"abcd")]
    end = sum(talk.size(m["content"]) for m in messages[-3:])
    talk.ask(messages)
    tokens = talk.ask([*messages[:3], *messages[-3:]], undeclared=AMORTIZE)["tokens"]
    assert end - 2 * SLACK <= tokens["spliced"] <= end + SLACK
    assert tokens["prefilled"] <= 3 * SLACK
    exact, messages = Talk(client, "exact-part"), [*opening("exact"), *rounds(*"abcd")]
    exact.ask(messages)
    tokens = exact.ask([*messages[:3], *messages[-3:]])["tokens"]
    assert (tokens["spliced"], tokens["prefilled"] >= end - SLACK) == (0, True)


def test_a_restart_keeps_system_prompt_and_tools(client: httpx.Client) -> None:
    """A new task under the same system prompt and tools finds both, in old and new sessions."""
    talk = Talk(client, "restart")
    first = opening("one")
    talk.ask([*first, *rounds("a", "b")], tools=TOOLS)
    shared = talk.ask(first[:1] + opening("two")[1:], tools=TOOLS)
    task = talk.size(opening("two")[1]["content"])
    assert shared["tokens"]["prefilled"] <= task + SLACK
    assert shared["tokens"]["spliced"] == 0
    elsewhere = Talk(client, "restart-elsewhere").ask(opening("three"), tools=TOOLS)["tokens"]
    assert elsewhere["prefix"] >= shared["tokens"]["prefix"] - SLACK
    other_tools = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "name": "other"}}]
    changed = talk.ask(first, tools=other_tools, undeclared=AMORTIZE | {"template": "amortize"})
    assert changed["tokens"]["spliced"] == 0, "nobody maps tools"


def test_a_prompt_draws_on_two_turns(client: httpx.Client) -> None:
    """One branch has the left part, another the right one: both are reused, neither twice."""
    talk, start = Talk(client, "two"), opening("two-sources")
    left, right = ({"role": "user", "content": text(name)} for name in ("left", "right"))
    end = {"role": "user", "content": text("end")}
    talk.ask(start)
    with_left = talk.ask([*start, left])["tokens"]["prompt"]
    talk.ask([*start, right, end])
    account = talk.ask([*start, left, right, end, *rounds("z")], undeclared={"user": "amortize"})
    tokens = account["tokens"]
    copied = talk.size(right["content"]) + talk.size(end["content"])
    assert account["outcome"] == "spliced"
    assert with_left - SLACK <= tokens["prefix"] <= with_left + SLACK
    assert copied - 2 * SLACK <= tokens["spliced"] <= copied + SLACK
    assert tokens["prefilled"] <= sum(talk.size(m["content"]) for m in rounds("z")) + 2 * SLACK
    assert len({(edit["message"], edit["cause"]) for edit in account["edits"]}) == len(
        account["edits"]
    )
    followed = talk.ask([*start, left, right, end, *rounds("z", "y")])
    assert followed["tokens"]["spliced"] == 0
    assert followed["tokens"]["prefix"] >= tokens["prompt"] - SLACK
