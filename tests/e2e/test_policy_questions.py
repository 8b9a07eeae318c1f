"""A policy's question about the conversation shares the session's KV both ways, over HTTP."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.scripted_model import (
    SCRIPTED,
    Prompt,
    Reply,
    ScriptedModel,
    build_scripted,
    scripted_model,
)
from support.stack import serving

from leyline_policies.builtin.summarize import HEADING, TASK
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings

Chat = list[dict[str, Any]]

POLICY = "summarize:trigger_tokens=1200,keep_messages=4,summary_tokens=400"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "description": "Reads a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]


def words(seed: int, lines: int) -> str:
    """A text that no other has a passage of."""
    rng = random.Random(seed)
    return "\n".join(
        " ".join("".join(rng.choices("aeilmnorst", k=5)) for _ in range(8)) + "."
        for _ in range(lines)
    )


SUMMARY = "The agent repaired these:\n" + words(1, 12)
SYSTEM = {"role": "system", "content": "You repair programs.\n" + words(2, 20)}


def is_question(prompt: Prompt) -> bool:
    """The last message is the policy's."""
    return prompt.messages[-1][1].startswith(TASK[:40])


def script(prompt: Prompt) -> tuple[Reply, bool]:
    """Answers the policy with the summary, and others with a text of their own."""
    if is_question(prompt):
        return Reply(SUMMARY), True
    task = prompt.messages[-1][1].splitlines()[0]
    return Reply(f"Done: {task}\n" + words(sum(map(ord, task)), 3)), True


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripted model."""
    return build_scripted(tmp_path_factory.mktemp("model"))


class Talk:
    """A session of an agent."""

    def __init__(self, http: httpx.Client, headers: dict[str, str]) -> None:
        self._http = http
        self._headers = headers
        self.chat: Chat = [SYSTEM]

    def ask(self, text: str, **more: Any) -> dict[str, Any]:
        """One turn; its account."""
        self.chat.append({"role": "user", "content": text})
        body = {
            "model": SCRIPTED,
            "messages": self.chat,
            "tools": TOOLS,
            "temperature": 0,
            "max_tokens": 400,
        }
        answer = self._http.post("/v1/chat/completions", json=body | more, headers=self._headers)
        assert answer.status_code == 200, answer.text
        document = answer.json()
        self.chat.append(document["choices"][0]["message"])
        account: dict[str, Any] = document["leyline"]
        return account

    def work(self, seed: int, rounds: int = 4) -> dict[str, Any]:
        """Some turns; the account of the last."""
        for number in range(rounds):
            account = self.ask(f"Task {seed}.{number}\n{words(seed * 10 + number, 12)}")
        return account

    def session(self, name: str) -> dict[str, Any]:
        """The session's document."""
        document: dict[str, Any] = self._http.get(f"/v1/leyline/sessions/{name}").json()
        return document


@contextmanager
def stack_of(files: Path, **settings: Any) -> Iterator[tuple[httpx.Client, ScriptedModel]]:
    """A client of a proxy with the policy, in front of an engine that follows the script."""
    given = {"policy": POLICY, "edit_timing": "now", "log_level": "error"} | settings
    with scripted_model(files, script) as model, serving(model.app) as upstream:
        app = create_app(Settings(upstream=upstream, **given))
        with serving(app) as origin, httpx.Client(base_url=origin, timeout=60) as http:
            yield http, model


@pytest.fixture(scope="module")
def stack(files: Path) -> Iterator[tuple[httpx.Client, ScriptedModel]]:
    """The stack with default settings."""
    with stack_of(files) as found:
        yield found


def written(http: httpx.Client, count: int) -> None:
    """Wait for so many answers to the policy."""
    line = f'leyline_policy_completions_total{{result="written"}} {count}.0'
    deadline = time.monotonic() + 20
    while line not in http.get("/metrics").text:
        assert time.monotonic() < deadline, line
        time.sleep(0.02)


def test_debug(files: Path) -> None:
    with stack_of(files) as (http, model):
        talk = Talk(http, {"x-leyline-session": "s"})
        print(talk.work(5, 3)["tokens"])
        written(http, 1)
        doc = talk.session("s")
        print(doc)
        account = talk.ask("Go on.")
        print(account)
        account = talk.ask("And on.")
        print(account)
        assert 0
