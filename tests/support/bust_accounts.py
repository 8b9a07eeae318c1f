"""Accounts of what a turn paid for: they agree with the engine's counts."""

from __future__ import annotations

from typing import Any


def check(account: dict[str, Any]) -> None:
    """The engine's counts are the prompt, lost and new tokens are what it prefilled, and entries
    are the lost ones."""
    tokens = account["tokens"]
    parts = ("prefix", "spliced", "reused", "prefilled")
    assert sum(tokens[name] for name in parts) == tokens["prompt"]
    assert sum(end - start for start, end in account["extents"]) == tokens["spliced"]
    busts = account.get("busts")
    if busts is None:
        return
    assert busts["lost_tokens"] + busts["new_tokens"] == tokens["prefilled"]
    if "entries" in busts:
        assert sum(each["tokens"] for each in busts["entries"]) == busts["lost_tokens"]
        assert all(each["tokens"] > 0 for each in busts["entries"])


def causes(account: dict[str, Any]) -> dict[str, int]:
    """Lost tokens by cause."""
    found: dict[str, int] = {}
    for each in account["busts"]["entries"]:
        found[each["cause"]] = found.get(each["cause"], 0) + each["tokens"]
    return found
