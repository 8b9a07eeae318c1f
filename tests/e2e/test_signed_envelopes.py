"""Proxy and engine that share a secret, or don't."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.stack import embedded_stack

ENGINE = {"hints_secret": "of the engine", "pool_tokens": 8192}


def edited_turn(origin: str) -> dict[str, Any]:
    """The account of a turn whose first tool result was truncated by the harness."""
    history: list[dict[str, Any]] = [
        {"role": "system", "content": "You are an agent in a repository. " * 12},
        {"role": "user", "content": "Fix the failing test."},
    ]
    for number in range(3):
        call = {"name": "bash", "arguments": "{}"}
        calls = [{"id": f"c{number}", "type": "function", "function": call}]
        history.append({"role": "assistant", "content": "", "tool_calls": calls})
        result = f"line {number} of the output\n" * 30
        history.append({"role": "tool", "tool_call_id": f"c{number}", "content": result})
    for messages in (history, [*history[:3], {**history[3], "content": "[cleared]"}, *history[4:]]):
        body = {
            "model": "leyline-recall",
            "messages": messages,
            "max_tokens": 2,
            "leyline": {"undeclared": {"tool": "amortize"}},
        }
        answer = httpx.post(
            f"{origin}/v1/chat/completions",
            json=body,
            headers={"x-leyline-session": "s"},
            timeout=60,
        )
        assert answer.status_code == 200
    account: dict[str, Any] = answer.json()["leyline"]
    return account


def test_the_shared_secret_lets_edits_through() -> None:
    """With the engine's secret the proxy's edits are spliced."""
    with embedded_stack(ENGINE, hints_secret="of the engine") as origin:
        account = edited_turn(origin)
    assert account["reason"] == "spliced"
    assert account["tokens"]["spliced"] > 0


@pytest.mark.parametrize("settings", [{}, {"hints_secret": "another"}], ids=["none", "another"])
def test_without_the_secret_nothing_is_edited(settings: dict[str, str]) -> None:
    """The request is served as an ordinary prefill, and the receipt names the reason."""
    with embedded_stack(ENGINE, **settings) as origin:
        account = edited_turn(origin)
    assert account["tokens"]["spliced"] == 0
    assert account["outcome"] != "spliced"
