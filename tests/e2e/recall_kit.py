"""A scripted model that recalls, behind a real proxy; histories whose first result is evicted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

from leyline_lab.stand_ins.scripted_model import (
    SCRIPTED,
    Call,
    Prompt,
    Reply,
    ScriptedModel,
    scripted_model,
)
from leyline_lab.stand_ins.serving import serving
from leyline_policies.stubs import ADDRESS
from leyline_proxy.http.app import create_app
from leyline_proxy.model.asides import RECALL_TOOL
from leyline_proxy.settings import Settings

POLICY = "truncate_older_than:n=1,max_chars=80,recallable=true"
LISTING = "".join(f"{n:03d} drwxr-xr-x build/module_{n}/object_{n * 7}.o\n" for n in range(40))
OTHER = "".join(f"line {n}: warning: unused variable 'v{n}'\n" for n in range(40))
ANSWER = "The module 7 has object 49."
HEADERS = {"x-leyline-session": "recalls"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {}}},
    }
    for name in ("shell", "note")
]

Script = Callable[[Prompt], Reply]


@contextmanager
def stack(files: Path, script: Script, **settings: Any) -> Iterator[tuple[str, ScriptedModel]]:
    """Proxy and engine whose model follows ``script``."""
    with scripted_model(files, lambda prompt: (script(prompt), True)) as model:
        options = {"recall": "on", "policy": POLICY, "log_level": "warning", **settings}
        app = create_app(Settings(**options), engine_app=model.app)
        with serving(app) as origin:
            yield origin, model


def noting(script: Script) -> tuple[list[Prompt], Script]:
    """Return a script that notes the prompts it answers, and its notes."""
    seen: list[Prompt] = []

    def noted(prompt: Prompt) -> Reply:
        seen.append(prompt)
        return script(prompt)

    return seen, noted


def client_of(origin: str, key: str = "none") -> openai.OpenAI:
    """Return a client of the proxy."""
    return openai.OpenAI(base_url=f"{origin}/v1", api_key=key, max_retries=0)


def called(turn: int, name: str = "shell") -> dict[str, Any]:
    """An assistant message that calls a tool."""
    function = {"name": name, "arguments": json.dumps({"command": f"ls {turn}"})}
    call = {"id": f"call_{turn}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def history() -> list[dict[str, Any]]:
    """Two tool calls, whose first result is evicted, and a question."""
    return [
        {"role": "system", "content": "You look into folders. " * 8},
        {"role": "user", "content": "List the modules, then build them."},
        called(0),
        {"role": "tool", "tool_call_id": "call_0", "content": LISTING},
        called(1),
        {"role": "tool", "tool_call_id": "call_1", "content": OTHER},
    ]


def asks_once(prompt: Prompt) -> Reply:
    """Ask for the evicted text, then answer."""
    results = [text for role, text in prompt.messages if role == "tool"]
    if any(text.strip() == LISTING.strip() for text in results):
        return Reply(ANSWER)
    found = next((m for text in results if (m := ADDRESS.search(text))), None)
    if found is None:
        return Reply("Nothing is missing.")
    return Reply("Let me look. ", (Call(RECALL_TOOL, {"address": found[0]}),))


def warmed(client: openai.OpenAI) -> None:
    """Send the turn in front of the eviction, so that the engine has the text's KV."""
    client.chat.completions.create(
        model=SCRIPTED, messages=history()[:4], tools=TOOLS, extra_headers=HEADERS
    )


def account(answer: Any) -> dict[str, Any]:
    """The member ``leyline``."""
    return dict(answer.model_extra["leyline"])
