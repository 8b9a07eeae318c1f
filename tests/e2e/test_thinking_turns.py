"""A model that thinks, behind the proxy: thinking that its template strips is spliced out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest
from support.stack import embedded_stack

from leyline_engine.fidelity.recall_task import SYSTEM_PROMPT, TOOLS
from leyline_engine.replay.models.trained import THINKING_MODEL_NAME

OUTPUTS = {"north": "port=falcon\nagent=agate", "march": "feed=basil\nclock=ebony\nbanner=fox\n"}
FILLER = "found the line and the file was read again\nno error while all checks passed"
CHOSEN = ("depth", "cache", "bucket")
Chat = list[dict[str, Any]]


class Remembered(NamedTuple):
    """The end of a session that was asked for what it had thought."""

    thought: str
    stripping: dict[str, Any]
    """The account of the turn whose template stripped the thinking."""
    answer: str


@pytest.fixture(scope="module", params=["amortize", "exact"])
def mode(request: pytest.FixtureRequest) -> str:
    """Modes of the edits that the template makes; amortize is the default."""
    return str(request.param)


@pytest.fixture(scope="module")
def client(mode: str) -> Iterator[httpx.Client]:
    """A client of a proxy with the model that thinks."""
    options = {"model": THINKING_MODEL_NAME, "pool_tokens": 8192, "device": "cpu"}
    settings = {"log_level": "error"} | ({} if mode == "amortize" else {"reasoning_edits": mode})
    with (
        embedded_stack(options, **settings) as origin,
        httpx.Client(base_url=origin, timeout=60) as http,
    ):
        yield http


def turn(client: httpx.Client, session: str, chat: Chat, text: str) -> list[dict[str, Any]]:
    """The answers of one turn of the user, calls included; the chat grows by it."""
    chat.append({"role": "user", "content": text})
    answers: list[dict[str, Any]] = []
    while len(answers) < 3:
        body = {"model": THINKING_MODEL_NAME, "messages": chat, "tools": list(TOOLS)}
        answer = client.post(
            "/v1/chat/completions",
            json=body | {"temperature": 0, "max_tokens": 60},
            headers={"x-leyline-session": session},
        )
        assert answer.status_code == 200, answer.text
        answers.append(answer.json())
        said = answers[-1]["choices"][0]["message"]
        chat.append({key: said[key] for key in ("role", "content", "tool_calls") if said.get(key)})
        if not said.get("tool_calls"):
            break
        call = said["tool_calls"][0]
        output = next((OUTPUTS[name] for name in OUTPUTS if name in text), "") + FILLER
        chat.append({"role": "tool", "tool_call_id": call["id"], "content": output})
    return answers


def remembered(client: httpx.Client, key: str) -> Remembered:
    """A session that chooses a value, does something else, and is asked for it."""
    chat: Chat = [{"role": "system", "content": SYSTEM_PROMPT}]
    turn(client, key, chat, "Read `north`.")
    chosen = turn(client, key, chat, f"Choose `{key}=` and read `march`.")
    thought = chosen[0]["choices"][0]["message"]["content"]
    stripping = turn(client, key, chat, "Run `april`.")[0]["leyline"]
    said = turn(client, key, chat, f"What is `{key}=`?")[0]["choices"][0]["message"]
    call = (said.get("tool_calls") or [{"function": {"name": ""}}])[0]["function"]["name"]
    return Remembered(thought, stripping, said.get("content") or f"{call}()")


def test_stripped_thinking_is_remembered_over_a_splice_only(
    client: httpx.Client, mode: str
) -> None:
    """The account names the template's edit; the value is known if what had read it was moved, and
    looked up if it was prefilled again."""
    found = {key: remembered(client, key) for key in CHOSEN}
    right = 0
    for key, (thought, account, answer) in found.items():
        assert thought.startswith(f"<think>\n{key}=") and "</think>" in thought
        (edit,) = account["edits"]
        assert (edit["cause"], edit["mode"], edit["replacement_tokens"]) == ("template", mode, 0)
        assert (account["tokens"]["spliced"] >= 32) == (mode == "amortize")
        right += answer == thought.split("\n")[1].split("=")[1]
    effect = {"amortize": "kept", "exact": "lost"}[mode]
    told = client.get("/metrics").text
    name = "leyline_reasoning_edit_tokens_total"
    counted = dict(re.findall(name + r'{.*effect="(\w+)".*} ([\d.]+)', told))
    assert {name for name, tokens in counted.items() if float(tokens) > 0} == {effect}
    if mode == "amortize":
        assert right >= len(CHOSEN) - 1, found
    else:
        assert right == 0 and sum(each.answer == "lookup()" for each in found.values()) >= 2, found
