"""The rules of `leyline_policies.policy.Policy`, each as a check of one transform call."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from leyline_policies.alignment import align
from leyline_policies.context import MAX_STATE_BYTES, Context
from leyline_policies.conversation import INSTRUCTION_ROLES, RESULT_ROLES, pair_calls, text_of
from leyline_policies.faults import may_forget
from leyline_policies.marks import mark_of, without_dropped
from leyline_policies.policy import Message, Policy
from leyline_policies.promises import forgets
from leyline_policies.recall import address_of, evicted_by, stubs_in

RULES: Mapping[str, str] = {
    "no_exception": "transform raises nothing",
    "returns_messages": "transform returns a list of messages that JSON can carry",
    "input_kept": "the given list and messages are not changed",
    "pairs_whole": "a tool call and its results stay or go together",
    "system_kept": "instructions stay; only a policy that forgets edits their text",
    "last_user_kept": "the last message of the user stays",
    "same_objects": "a message that isn't edited is returned as the very object that was given",
    "forgets_said": "a policy whose edits may be forgets says so: mode forget, or forgets = True",
    "stubs_found": "an address in a message that the policy made has its text, and no other text",
    "state_json": f"the state is JSON, at most {MAX_STATE_BYTES:,} bytes of it",
    "notes_numbers": "notes hold finite numbers",
    "idempotent": "the same messages and the same state give the same result, also when repeated",
    "deterministic": "a session played anew gives the same results",
    "renders": "what could be rendered before can be rendered after",
}
"""Names of the rules, and their demands."""


class RuleBrokenError(AssertionError):
    """A policy breaks a rule; the message names policy, rule, session, turn and message."""

    def __init__(
        self, policy: str, rule: str, place: tuple[int, int], message: int | None, detail: str
    ) -> None:
        session, turn = place
        at = f", message {message}" if message is not None else ""
        super().__init__(
            f"policy {policy!r} breaks the rule {rule!r} ({RULES[rule]}) "
            f"in session {session}, turn {turn}{at}: {detail}"
        )
        self.policy, self.rule = policy, rule
        self.session, self.turn, self.message = session, turn, message
        self.detail = detail


class NothingEditedWarning(UserWarning):
    """A policy edited nothing, so the rules for edits weren't tried."""


@dataclass(frozen=True, slots=True)
class Breach:
    """The way in which a rule is broken."""

    detail: str
    message: int | None = None
    """The place in the list to which ``detail`` refers."""


@dataclass(frozen=True)  # no slots: the common part of the two lists is computed once
class Call:
    """One call of transform."""

    policy: Policy
    given: list[Message]
    returned: list[Message]
    context: Context = field(repr=False)

    @cached_property
    def after(self) -> list[Message]:
        """The messages to send."""
        return without_dropped(self.returned)

    @cached_property
    def became(self) -> dict[int, int]:
        """Place after the call by place before it."""
        return dict(align(self.given, self.after))

    def forgets(self, message: Message) -> bool:
        """Return True if the edit that made ``message`` is a forget."""
        mark = mark_of(message)
        return (mark.mode if mark and mark.mode else self.policy.mode) == "forget"


def is_message_list(returned: object) -> Breach | None:
    """Check the rule ``returns_messages``."""
    if not isinstance(returned, list):
        return Breach(f"it returned a {type(returned).__name__}")
    for index, message in enumerate(returned):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return Breach("it is no message: an object with a role", index)
        try:
            json.dumps(message)
        except (TypeError, ValueError, RecursionError) as error:
            return Breach(f"it is no JSON: {error}", index)
    return None


def is_unchanged(before: Sequence[Message], given: Sequence[Message]) -> Breach | None:
    """Check the rule ``input_kept``; ``before`` is a copy made before the call."""
    if len(before) != len(given):
        return Breach(f"the list held {len(before)} messages and holds {len(given)}")
    for index, (old, new) in enumerate(zip(before, given, strict=True)):
        if old != new:
            return Breach("it was changed", index)
    return None


def _pairs_whole(call: Call) -> Breach | None:
    open_before = {key for _, key in _unanswered(call.given)}
    for index, key in _unanswered(call.after):
        if key not in open_before:
            return Breach(f"its tool call {key} lost its result", index)
    lost_before = {key for _, key in _orphans(call.given)}
    for index, key in _orphans(call.after):
        if key not in lost_before:
            return Breach(f"this result of {key} lost its call", index)
    return None


def _unanswered(messages: Sequence[Message]) -> Iterator[tuple[int, str]]:
    for call in pair_calls(messages):
        if not call.results:
            made = messages[call.message].get("tool_calls")
            identifier = made[call.position].get("id") if made and call.position is not None else ""
            yield call.message, f"{call.name}({identifier})"


def _orphans(messages: Sequence[Message]) -> Iterator[tuple[int, str]]:
    answered = {index for call in pair_calls(messages) for index in call.results}
    for index, message in enumerate(messages):
        if message.get("role") in RESULT_ROLES and index not in answered:
            yield index, str(message.get("tool_call_id") or message.get("name"))


def _system_kept(call: Call) -> Breach | None:
    for index, message in enumerate(call.given):
        if message.get("role") not in INSTRUCTION_ROLES or message in call.after:
            continue
        place = call.became.get(index)
        if place is None:
            return Breach("the instructions are gone", index)
        if not call.forgets(call.after[place]):
            return Breach("the instructions were edited", index)
    return None


def _last_user_kept(call: Call) -> Breach | None:
    users = [index for index, m in enumerate(call.given) if m.get("role") == "user"]
    if not users or users[-1] in call.became or call.given[users[-1]] in call.after:
        return None
    return Breach("it is gone", users[-1])


def _same_objects(call: Call) -> Breach | None:
    for old, new in call.became.items():
        if call.after[new] is not call.given[old] and call.after[new] == call.given[old]:
            return Breach("it is a copy", new)
    return None


def _forgets_said(call: Call) -> Breach | None:
    if may_forget(call.policy):
        return None
    given = set(map(id, call.given))
    for index, message in enumerate(call.returned):
        if id(message) not in given and forgets(message, given):
            return Breach("it is to be forgotten", index)
    return None


def _stubs_found(call: Call) -> Breach | None:
    given = set(map(id, call.given))
    known = {each.address for message in call.given for each in stubs_in(text_of(message))}
    for index, message in enumerate(call.after):
        if id(message) in given:
            continue
        parts = {part.address: part.text for part in evicted_by(message)}
        if any(address != address_of(text) for address, text in parts.items()):
            return Breach("an address is another text's", index)
        if any(each.address not in known | parts.keys() for each in stubs_in(text_of(message))):
            return Breach("it shows the address of no text", index)
    return None


def _state_json(call: Call) -> Breach | None:
    state = call.context.state
    try:
        text = json.dumps(state, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return Breach(f"its state is no JSON: {error}")
    if json.loads(text) != state:
        return Breach("its state is another one after a trip through JSON")
    if len(text) > MAX_STATE_BYTES:
        return Breach(f"its state takes {len(text):,} bytes")
    return None


def _notes_numbers(call: Call) -> Breach | None:
    for note in call.context.notes:
        for key, value in note.values.items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                held = value if isinstance(value, float) else f"a {type(value).__name__}"
                return Breach(f"its note {note.kind} holds {held} as {key}")
    return None


CHECKS: Mapping[str, Callable[[Call], Breach | None]] = {
    "pairs_whole": _pairs_whole,
    "system_kept": _system_kept,
    "last_user_kept": _last_user_kept,
    "same_objects": _same_objects,
    "forgets_said": _forgets_said,
    "stubs_found": _stubs_found,
    "state_json": _state_json,
    "notes_numbers": _notes_numbers,
}
"""Checks of rules that one call shows, by name."""
