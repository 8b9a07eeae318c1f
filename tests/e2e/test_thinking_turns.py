"""A model that thinks, behind the proxy: thinking that its template strips is spliced out."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest
from support.redis_server import free_port
from support.stack import embedded_stack
from typer.testing import CliRunner

from leyline_lab.fidelity.recall_task import SYSTEM_PROMPT, TOOLS
from leyline_proxy.cli import build_app
from leyline_proxy.doctor import Status
from leyline_proxy.doctor.reasoning import examine_reasoning
from leyline_proxy.settings import Settings
from leyline_replay.models.trained import THINKING_MODEL_NAME

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
        check_busts(account, mode)
        right += answer == thought.split("\n")[1].split("=")[1]
    effect = {"amortize": "kept", "exact": "lost"}[mode]
    told = client.get("/metrics").text
    name = "leyline_reasoning_edit_tokens_total"
    counted = dict(re.findall(name + r'{.*effect="(\w+)".*} ([\d.]+)', told))
    assert {name for name, tokens in counted.items() if float(tokens) > 0} == {effect}
    check_doctor(str(client.base_url), effect, int(float(counted[effect])))
    if mode == "amortize":
        assert right >= len(CHOSEN) - 1, found
    else:
        assert right == 0 and sum(each.answer == "lookup()" for each in found.values()) >= 2, found


def check_busts(account: dict[str, Any], mode: str) -> None:
    """The turn's account says what the other setting would have done with its tokens."""
    busts = account["busts"]
    kept, lost = busts["thinking"]["kept"], busts["thinking"]["lost"]
    assert sum(each["tokens"] for each in busts["entries"]) == busts["lost_tokens"]
    assert {each["cause"] for each in busts["entries"]} <= {"template"}
    if mode == "amortize":
        assert 32 <= kept <= account["tokens"]["spliced"] and lost == 0
    else:
        (entry,) = busts["entries"]
        assert (entry["role"], entry["why"], entry["message"]) == ("template", "exact", None)
        assert (kept, lost) == (0, entry["tokens"]) and lost >= 32


def check_doctor(origin: str, effect: str, tokens: int) -> None:
    """Doctor asks the running proxy, by its URL and by its settings."""
    words = {"kept": f"amortize copied {tokens:,}", "lost": f"exact prefilled {tokens:,}"}[effect]
    result = CliRunner().invoke(build_app(), ["doctor", origin], env={"COLUMNS": "200"})
    assert words in result.stdout
    result = CliRunner().invoke(build_app(), ["doctor", origin, "--json"])
    document = json.loads(result.stdout)
    other = {"kept": "lost", "lost": "kept"}[effect]
    assert document["splices"] and document["reasoning_edits"] == {effect: tokens, other: 0}
    host, port = origin.removeprefix("http://").rstrip("/").split(":")
    mode = "amortize" if effect == "kept" else "exact"
    settings = Settings(host=host, port=int(port), reasoning_edits=mode)
    (finding,) = asyncio.run(examine_reasoning(settings))
    assert (finding.status, finding.name) == (Status.OK, "reasoning-edits")
    assert words in finding.detail
    # Where amortize is set and still more was exact, somebody should look.
    (finding,) = asyncio.run(examine_reasoning(Settings(host=host, port=int(port))))
    assert finding.status is (Status.OK if effect == "kept" else Status.WARN)
    (finding,) = asyncio.run(examine_reasoning(Settings(host=host, port=free_port())))
    assert finding.status is Status.SKIP
