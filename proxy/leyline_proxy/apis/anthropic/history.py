"""The blocks of the Messages API, and what becomes of each in a history."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..foreign import UNKNOWN, Rule, Treatment, mapped

_TEXT, _SKIPPED = Treatment.TEXT, Treatment.SKIPPED
_RAN = "Anthropic's servers ran it; its results follow"
_RESULT = "what Anthropic's servers returned; pictures and files in it as their kind in brackets"

BLOCKS: Mapping[str, Rule] = MappingProxyType(
    {
        "text": mapped("text"),
        "image": mapped("an image by URL or data URL"),
        "document": mapped("text, or a file"),
        "search_result": mapped("text"),
        "thinking": mapped("`reasoning_content`"),
        "tool_use": mapped("a call"),
        "tool_result": mapped("a `tool` message"),
        "tool_addition": mapped("a function, and a text about it"),
        "tool_removal": mapped("a function less, and a text about it"),
        "compaction": mapped("the messages in place of those before it"),
        "redacted_thinking": Rule(_SKIPPED, "only Anthropic can read it", native=True),
        "server_tool_use": Rule(_TEXT, _RAN),
        "mcp_tool_use": Rule(_TEXT, _RAN),
        "web_search_tool_result": Rule(_TEXT, _RESULT),
        "web_fetch_tool_result": Rule(_TEXT, _RESULT),
        "code_execution_tool_result": Rule(_TEXT, _RESULT),
        "bash_code_execution_tool_result": Rule(_TEXT, _RESULT),
        "text_editor_code_execution_tool_result": Rule(_TEXT, _RESULT),
        "tool_search_tool_result": Rule(_TEXT, "the names of the tools, which are offered now"),
        "mcp_tool_result": Rule(_TEXT, _RESULT),
        "advisor_tool_result": Rule(_TEXT, _RESULT),
        "container_upload": Rule(_SKIPPED, "the file is in a container of Anthropic's"),
        "mcp_tool_listing": Rule(_SKIPPED, "nobody here can call these tools"),
        "fallback": Rule(_SKIPPED, "another of Anthropic's models answered; it says nothing"),
    }
)
"""Rules by type, for every block that a request may hold."""


def rule_of(block: Mapping[str, Any]) -> Rule:
    """Return the rule for a block that has no form of its own at its place."""
    rule = BLOCKS.get(block["type"], UNKNOWN)
    return UNKNOWN if rule.treatment is Treatment.MAPPED else rule
