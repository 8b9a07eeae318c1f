"""The items of the Responses API, and what becomes of each in a history."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..foreign import UNKNOWN, Rule, Treatment, mapped

_TEXT, _SKIPPED = Treatment.TEXT, Treatment.SKIPPED
_CALL, _RESULT = "a call", "a `tool` message"
_NO_RESULT = "OpenAI's servers ran it, and it holds no result"
_RAN = "what OpenAI's servers did, and what came of it"

ITEMS: Mapping[str, Rule] = MappingProxyType(
    {
        "message": mapped("a message"),
        "reasoning": mapped("`reasoning_content`"),
        "function_call": mapped(_CALL),
        "function_call_output": mapped(_RESULT),
        "custom_tool_call": mapped(_CALL),
        "custom_tool_call_output": mapped(_RESULT),
        "local_shell_call": mapped(_CALL),
        "local_shell_call_output": mapped(_RESULT),
        "shell_call": Rule(Treatment.MAPPED, "a call of `shell`"),
        "shell_call_output": Rule(Treatment.MAPPED, _RESULT),
        "apply_patch_call": Rule(Treatment.MAPPED, "a call of `apply_patch`"),
        "apply_patch_call_output": Rule(Treatment.MAPPED, _RESULT),
        "computer_call": Rule(Treatment.MAPPED, "a call of `computer`"),
        "computer_call_output": Rule(Treatment.MAPPED, f"{_RESULT} with the picture"),
        "additional_tools": mapped("tools"),
        "compaction": mapped("the messages in place of those before it"),
        "compaction_trigger": mapped("a request for a compaction"),
        "item_reference": mapped("the stored item; 404 if it isn't stored here"),
        "web_search_call": Rule(_SKIPPED, _NO_RESULT, native=True),
        "tool_search_call": Rule(_SKIPPED, _NO_RESULT, native=True),
        "tool_search_output": Rule(_SKIPPED, "agents offer these tools again", native=True),
        "file_search_call": Rule(_TEXT, _RAN),
        "code_interpreter_call": Rule(_TEXT, _RAN),
        "image_generation_call": Rule(
            _TEXT, "its prompt, without the picture", members=("revised_prompt", "error")
        ),
        "mcp_call": Rule(_TEXT, _RAN),
        "mcp_list_tools": Rule(_SKIPPED, "nobody here can call these tools"),
        "mcp_approval_request": Rule(_TEXT, "the call that waited for an approval"),
        "mcp_approval_response": Rule(_TEXT, "the user's decision, as a user message"),
        "program": Rule(_TEXT, "the code that OpenAI's servers ran"),
        "program_output": Rule(_TEXT, "its result"),
        "configuration_update": Rule(_SKIPPED, "the request's own options apply"),
    }
)
"""Rules by type, for every item that a request may hold."""

OF_USER = frozenset({"mcp_approval_response"})
"""Types of items that the user wrote, and that are shown as text."""


def rule_of(kind: str) -> Rule:
    """Return the rule for items of a type."""
    return ITEMS.get(kind, UNKNOWN)


def is_foreign(kind: str) -> bool:
    """Return True for items that have no form of their own in a chat request."""
    return rule_of(kind).treatment is not Treatment.MAPPED
