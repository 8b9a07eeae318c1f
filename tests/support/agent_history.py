"""The history of an agent that looks into folders."""

from __future__ import annotations

import json
from typing import Any


def agent_history(
    count: int, task: str, *, secret: str, secret_at: int = 0, lines: int = 8
) -> list[dict[str, Any]]:
    """A call and its result per turn, after a system prompt and a task.

    Args:
        secret: text that one result holds in its middle.
        secret_at: number of the turn whose result it is.
        lines: of each result; the one with the secret has twice as many.
    """
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are an agent that looks into folders. " * 3},
        {"role": "user", "content": task},
    ]
    for turn in range(count):
        listing = " ".join(f"line {turn}.{number} of the listing" for number in range(lines))
        function = {"name": "shell", "arguments": json.dumps({"command": f"ls {turn}"})}
        call = {"id": f"c{turn}", "type": "function", "function": function}
        result = f"{listing}\n{secret}\n{listing}" if turn == secret_at else listing
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{turn}", "content": result},
        ]
    return messages
