"""``context_management`` in a request: Anthropic's server-side edits, on any model.

The edits that clear are policies that come with Leyline, under their names in the API; see the
documentation of Anthropic's context editing for the purpose of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from leyline_policies import Context, Message, Mode, Policy, run
from leyline_policies.builtin.clear_thinking import ClearThinking
from leyline_policies.builtin.clear_tool_uses import ClearToolUses
from leyline_policies.errors import did_you_mean, shown

from ..model.compaction import DEFAULT_THRESHOLD, CompactionWish
from ..model.fields import OptionError, field_error
from ..model.prepared import Prepared, SentMessage
from .compaction import Instructions, Threshold

CONTEXT_FIELD = "context_management"
MAX_EDITS = 8
MAX_TOOLS = 256
"""Most tools that an edit names."""

Count = Annotated[int, msgspec.Meta(ge=0)]
_ToolName = Annotated[str, msgspec.Meta(max_length=256)]


class _Tokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["input_tokens"]
    value: Count


class _Trigger(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["input_tokens", "tool_uses"]
    value: Count


class _KeptUses(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["tool_uses"]
    value: Count


class _KeptTurns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["thinking_turns"]
    value: Annotated[int, msgspec.Meta(ge=1)]


class ClearToolUsesEdit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``clear_tool_uses_20250919``."""

    type: str
    trigger: _Trigger = _Trigger("input_tokens", 100_000)
    keep: _KeptUses = _KeptUses("tool_uses", 3)
    clear_at_least: _Tokens | None = None
    exclude_tools: Annotated[tuple[_ToolName, ...], msgspec.Meta(max_length=MAX_TOOLS)] = ()
    clear_tool_inputs: bool = False

    def policy(self) -> Policy:
        """Return the policy of this edit."""
        by_tokens = self.trigger.type == "input_tokens"
        return ClearToolUses(
            trigger_tokens=self.trigger.value if by_tokens else None,
            trigger_tool_uses=None if by_tokens else self.trigger.value,
            keep=self.keep.value,
            clear_at_least=self.clear_at_least.value if self.clear_at_least else 0,
            clear_tool_inputs=self.clear_tool_inputs,
            exclude_tools=self.exclude_tools,
        )


class ClearThinkingEdit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``clear_thinking_20251015``."""

    type: str
    keep: _KeptTurns | Literal["all"] = _KeptTurns("thinking_turns", 1)

    def policy(self) -> Policy:
        """Return the policy of this edit."""
        return ClearThinking(keep="all" if isinstance(self.keep, str) else str(self.keep.value))


class _CompactTrigger(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["input_tokens"]
    value: Threshold


class CompactEdit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``compact_20260112``, which is no policy: the proxy asks the model for a summary."""

    type: str
    trigger: _CompactTrigger | None = None
    instructions: Instructions | None = None
    pause_after_compaction: bool = False

    def wish(self) -> CompactionWish:
        """Return the wish."""
        least = self.trigger.value if self.trigger is not None else DEFAULT_THRESHOLD
        return CompactionWish(least, self.instructions, self.pause_after_compaction)


COMPACT = "compact_20260112"

_EDITS: dict[str, type[ClearToolUsesEdit | ClearThinkingEdit | CompactEdit]] = {
    "clear_tool_uses_20250919": ClearToolUsesEdit,
    "clear_thinking_20251015": ClearThinkingEdit,
    COMPACT: CompactEdit,
}
_COUNTED = {
    "clear_tool_uses_20250919": "cleared_tool_uses",
    "clear_thinking_20251015": "cleared_thinking_turns",
}


@dataclass(frozen=True, slots=True)
class RequestedEdit:
    """A policy under its name in the request."""

    name: str
    policy: Policy

    trusted = True

    @property
    def mode(self) -> Mode:
        """The policy's mode."""
        return self.policy.mode

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the messages as the policy transforms them."""
        return run(self.policy, messages, turn_idx, context)


class RequestedEdits(NamedTuple):
    """The edits in a request's ``context_management``."""

    policies: tuple[Policy, ...] = ()
    compaction: CompactionWish | None = None


def parse_context_management(raw: object) -> RequestedEdits:
    """Return the edits that a request asks for; none for an absent member.

    Raises:
        OptionError: names the field and its allowed values.
    """
    if raw is None:
        return RequestedEdits()
    edits = raw.get("edits") if isinstance(raw, dict) and not raw.keys() - {"edits"} else None
    if not isinstance(edits, list):
        raise OptionError(CONTEXT_FIELD, f'{CONTEXT_FIELD} must be an object {{"edits": [...]}}.')
    if len(edits) > MAX_EDITS:
        raise OptionError(
            f"{CONTEXT_FIELD}.edits", f"{CONTEXT_FIELD}.edits may hold at most {MAX_EDITS} edits."
        )
    found = [_requested(f"{CONTEXT_FIELD}.edits[{i}]", edit) for i, edit in enumerate(edits)]
    names = [edit.type for edit in found]
    if len(set(names)) < len(names):
        raise OptionError(
            f"{CONTEXT_FIELD}.edits", f"{CONTEXT_FIELD}.edits names the same type twice."
        )
    if "clear_thinking_20251015" in names[1:]:
        raise OptionError(
            f"{CONTEXT_FIELD}.edits",
            f"{CONTEXT_FIELD}.edits: clear_thinking_20251015 must be listed first.",
        )
    policies = (
        RequestedEdit(edit.type, edit.policy())
        for edit in found
        if not isinstance(edit, CompactEdit)
    )
    wishes = (edit.wish() for edit in found if isinstance(edit, CompactEdit))
    return RequestedEdits(tuple(policies), next(wishes, None))


def applied_edits(
    prepared: Prepared, requested: Mapping[str, Policy], tokens: Callable[[Message], int]
) -> list[dict[str, Any]]:
    """Return the API's report of the requested edits, without those that changed nothing.

    Args:
        requested: policies by name.
        tokens: returns the tokens of a message.
    """
    accounts = []
    for name in requested:
        cause = f"policy:{name}"
        changed = [
            entry
            for entry in prepared.sent
            if entry.client_index is not None
            and any(change.cause.startswith(cause) for change in entry.changes)
        ]
        if changed:
            before = (prepared.client[entry.client_index or 0] for entry in changed)
            gone = sum(map(tokens, before)) - sum(tokens(entry.message) for entry in changed)
            account = {"type": name, _COUNTED[name]: _units(name, changed, prepared)}
            accounts.append(account | {"cleared_input_tokens": max(0, gone)})
    return accounts


def _units(name: str, changed: list[SentMessage], prepared: Prepared) -> int:
    if name == "clear_tool_uses_20250919":
        return sum(entry.message.get("role") != "assistant" for entry in changed)
    # A turn is everything from the assistant between two messages of the user.
    turns: list[int] = []
    count = 0
    for message in prepared.client:
        count += message.get("role") == "user"
        turns.append(count)
    return len({turns[entry.client_index or 0] for entry in changed})


def _requested(where: str, raw: object) -> ClearToolUsesEdit | ClearThinkingEdit | CompactEdit:
    kind = raw.get("type") if isinstance(raw, dict) else None
    if not isinstance(kind, str):
        raise OptionError(where, f"{where} must be an object with a type.")
    if kind not in _EDITS:
        raise OptionError(
            f"{where}.type",
            f"{where}.type: {shown(kind)} isn't offered here{did_you_mean(kind, _EDITS) or ';'} "
            f"(known: {', '.join(_EDITS)}).",
        )
    try:
        return msgspec.convert(raw, _EDITS[kind])
    except msgspec.ValidationError as error:
        raise field_error(where, str(error), _EDITS[kind].__struct_fields__, raw) from error
