"""A model that summarizes, in the real engine, and conversations long enough for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from leyline_lab.stand_ins.scripted_model import (
    Prompt,
    Reply,
    Script,
    ScriptedModel,
    scripted_model,
)
from leyline_lab.stand_ins.serving import engine_tokenizer, serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings

SUMMARY = (
    "Goal: find the parser. Found: src/parse.c, line 41. Tried: grep, without luck. Left: fix."
)
ANSWER = "The parser is in src/parse.c."
ASKED = "Summarize this conversation"
LISTING = "".join(f"{number:04d} drwxr-xr-x build/module_{number}\n" for number in range(40))
TASK = "Find the parser, please."
SYSTEM = "You are an agent that looks into folders."


def asks_for_summary(prompt: Prompt) -> bool:
    """The last message is the proxy's question."""
    return ASKED in prompt.messages[-1][1]


def script(prompt: Prompt) -> tuple[Reply, bool]:
    """Summarize when asked to, and answer all else alike."""
    asked = asks_for_summary(prompt)
    return Reply(SUMMARY if asked else ANSWER), asked


@contextmanager
def compacting_stack(
    files: Path, script: Script = script, **settings: Any
) -> Iterator[tuple[str, ScriptedModel]]:
    """The origin of a proxy before that model, and the model."""
    with scripted_model(files, script) as model:
        app = create_app(Settings(log_level="error", **settings), engine_app=model.app)
        with serving(app) as origin:
            yield origin, model


def chat(calls: int = 3, task: str = TASK) -> list[dict[str, Any]]:
    """A chat with so many tool calls."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task},
    ]
    for number in range(calls):
        function = {"name": "ls", "arguments": json.dumps({"path": str(number)})}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{number}", "content": f"{number}\n{LISTING}"},
        ]
    return messages


def prompts(model: ScriptedModel) -> list[Prompt]:
    """All prompts, in order."""
    tokenizer = engine_tokenizer(model.app)
    return [
        Prompt.of(tokenizer.decode(tokens.tolist(), skip_special_tokens=False))
        for tokens, _, _ in model.admitted
    ]
