"""Verbs: a caller's or a policy's wishes for a message.

A message may carry a member ``leyline``, which never reaches the engine::

    {"role": "tool", "tool_call_id": "c1", "content": "…", "leyline": {"decay": {"turns": 3}}}

=========  ====================================================================================
evict      the message goes now; later tokens have read it (amortize)
forget     the message goes now, and with it all that was computed after reading it (forget)
decay      it goes after so many ``turns`` or ``seconds``, whichever is first
scratch    it goes with the end of the turn that made it
pin        no policy edits it, except to forget; that its KV stays resident is a claim
share      what this turn splices may be seen in this scope
verdict    ``quarantine``: a stub takes the message's place now and on every later turn of the
           session, and all that was computed after reading it goes (forget)
=========  ====================================================================================

A tool result that is removed leaves a stub, so that its call stays answered, and so does a message
that makes calls, whose arguments are removed with the rest. The user's last message is never
removed; in quarantine, any message leaves a stub, the user's last one as well. Turns are counted by
the answers after a message.

Policies say the same with the functions here: ``[pin(m) if is_plan(m) else m for m in messages]``.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from leyline_policies.context import Context
from leyline_policies.conversation import INSTRUCTION_ROLES, RESULT_ROLES, nth_last, text_of
from leyline_policies.faults import OnFault
from leyline_policies.marks import drop, edit
from leyline_policies.policy import Message, Mode

ANNOTATION = "leyline"
_SCOPE = re.compile(r"[A-Za-z0-9._:@/-]{1,128}")
_MAX_TTL_S = 7 * 24 * 3600
Leaving = Literal["evict", "forget", "decay", "scratch", "quarantine"]
PinKind = Literal["soft", "hard"]
STUBS: dict[Leaving, str] = {
    "evict": "[evicted]",
    "forget": "[forgotten]",
    "decay": "[decayed]",
    "scratch": "[gone]",
}
VERDICT = "verdict"
"""The member that gives a verdict on a message, and the cause of a quarantine by such a verdict."""
QUARANTINE = "quarantine"
_QUARANTINED = re.compile(r"\[quarantined: ([a-z0-9][a-z0-9_.-]{0,47})\]")

_OF_RESULTS = ("role", "name", "tool_call_id")
_BODIES = ("function", "custom")
_NOTHING = {"arguments": "{}", "input": ""}
_SEEN = "seen"
_MAX_SEEN = 400
"""Number of messages whose first sight is remembered: about 12 KiB of state."""


def evict(message: Message) -> Message:
    """Remove the message; KV computed after reading it stays."""
    return annotated(message, evict=True)


def forget(message: Message) -> Message:
    """Remove the message, and all that was computed after reading it."""
    return annotated(message, forget=True)


def quarantine(message: Message) -> Message:
    """Put a stub in the message's place for the rest of the session, and remove all that was
    computed after reading it. Instructions stay."""
    return annotated(message, verdict=QUARANTINE)


def decay(message: Message, *, turns: int | None = None, seconds: float | None = None) -> Message:
    """Remove the message after so many turns or seconds, whichever is first.

    Raises:
        ValueError: neither is given, or one isn't positive.
    """
    given = {"turns": turns, "seconds": seconds}
    terms = {name: value for name, value in given.items() if value is not None}
    if not terms or min(terms.values()) <= 0:
        raise ValueError("decay needs turns or seconds, more than 0")
    return annotated(message, decay=terms)


def scratch(message: Message) -> Message:
    """Remove the message at the end of the turn that made it."""
    return annotated(message, scratch=True)


def pin(
    message: Message,
    *,
    kind: PinKind | None = None,
    priority: int | None = None,
    ttl_s: int | None = None,
) -> Message:
    """Let no policy edit the message, except to forget; its KV stays if the engine takes claims.

    Args:
        kind: ``soft`` (by default): evicted after KV of lower priority. ``hard``: locked.
        priority: 0 to 100; by default 50.
        ttl_s: seconds, at most a week, after which it ends unless renewed; by default an hour.

    Raises:
        ValueError: one of them is out of bounds.
    """
    given = {"kind": kind, "priority": priority, "ttl_s": ttl_s}
    terms = {name: value for name, value in given.items() if value is not None}
    if kind not in (None, "soft", "hard"):
        raise ValueError(f"kind is {kind!r}; it must be 'soft' or 'hard'")
    for name, low, high in (("priority", 0, 100), ("ttl_s", 1, _MAX_TTL_S)):
        value = terms.get(name, low)
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{name} is {value!r}; it must be a whole number, {low} to {high}")
    return annotated(message, pin=terms or True)


def share(message: Message, scope: str) -> Message:
    """Let this scope of the tenant see what the turn splices.

    Raises:
        ValueError: ``scope`` isn't a name of letters, digits and ``._:@/-``.
    """
    if not _SCOPE.fullmatch(scope):
        raise ValueError(f"{scope[:60]!r} is no name of a scope")
    return annotated(message, share=scope)


def scopes_of(messages: Sequence[Message]) -> frozenset[str]:
    """Return the scopes that messages name for sharing."""
    named = (_said(message).get("share") for message in messages)
    return frozenset(each for each in named if isinstance(each, str) and _SCOPE.fullmatch(each))


def annotated(message: Message, **said: Any) -> Message:
    """Return a copy of ``message`` with further annotations."""
    noted = message.get(ANNOTATION)
    members: dict[str, Any] = {ANNOTATION: {**(noted if isinstance(noted, dict) else {}), **said}}
    return edit(message, **members)


def is_annotated(message: Message) -> bool:
    """Return True if the message is annotated."""
    return ANNOTATION in message


def is_forgotten(message: Message) -> bool:
    """Return True if the message's annotations demand that it is forgotten."""
    return bool(_said(message).get("forget")) or is_condemned(message)


def is_condemned(message: Message) -> bool:
    """Return True if the message's own verdict puts it into quarantine."""
    condemned = _said(message).get(VERDICT) == QUARANTINE
    return condemned and message.get("role") not in INSTRUCTION_ROLES


def unannotated(message: Message) -> Message:
    """Return the message as an engine may see it; the very one if it has no annotations."""
    if not is_annotated(message):
        return message
    return {key: value for key, value in message.items() if key != ANNOTATION}


def pinned(messages: Sequence[Message]) -> frozenset[int]:
    """Return the places of messages that no policy may edit."""
    return frozenset(i for i, message in enumerate(messages) if pin_of(message) is not None)


def pin_of(message: Message) -> dict[str, Any] | None:
    """Return the given terms on which a message is pinned; None if it isn't."""
    said = _said(message).get("pin")
    if isinstance(said, dict):
        return said
    return {} if said else None


@dataclass(frozen=True, slots=True)
class Verbs:
    """Carry out the annotations of messages. Runs by itself if there are any."""

    name: ClassVar[str] = "verbs"
    mode: ClassVar[Mode] = "amortize"
    trusted: ClassVar[bool] = True

    forgets: bool = False
    """True if any of them must be forgotten."""

    @property
    def on_fault(self) -> OnFault | None:
        """``refuse`` for forgets, which are demanded: no setting takes that back."""
        return "refuse" if self.forgets else None

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the messages without those that are due to be removed."""
        due = dict(_due(messages, context))
        if not due:
            return messages
        last_user = nth_last(messages, "user", 1)
        if last_user is not None and due.get(last_user) != QUARANTINE:
            due.pop(last_user, None)
        return [
            _gone(message, due[index]) if index in due else message
            for index, message in enumerate(messages)
        ]


def _due(messages: Sequence[Message], context: Context) -> Iterator[tuple[int, Leaving]]:
    """Yield the messages that are removed on this turn, and by which verb."""
    ages = _ages(messages, context)
    behind = sum(message.get("role") == "assistant" for message in messages)
    for index, message in enumerate(messages):
        behind -= message.get("role") == "assistant"
        said = _said(message)
        if is_condemned(message):
            yield index, "quarantine"
        elif is_forgotten(message):
            yield index, "forget"
        elif said.get("evict"):
            yield index, "evict"
        elif said.get("scratch") and behind > 0:
            yield index, "scratch"
        elif behind >= _term(said, "turns") or ages.get(index, 0.0) >= _term(said, "seconds"):
            yield index, "decay"


def _term(said: dict[str, Any], unit: str) -> float:
    """Return the term after which a message is removed; infinite without a sensible one."""
    terms = said.get("decay")
    term = terms.get(unit) if isinstance(terms, dict) else None
    return term if isinstance(term, int | float) else math.inf


def _ages(messages: Sequence[Message], context: Context) -> dict[int, float]:
    """Return the seconds since messages with a term were first seen."""
    timed = [i for i, message in enumerate(messages) if _term(_said(message), "seconds") < math.inf]
    if not timed:
        context.state.pop(_SEEN, None)
        return {}
    before: dict[str, float] = context.state.get(_SEEN, {})
    now = round(context.elapsed_s, 3)
    seen: dict[str, float] = {}
    ages: dict[int, float] = {}
    # Only the newest so many fit into a state. Then older ones are as old as those, at least.
    unknown, is_full = now, len(before) == _MAX_SEEN
    for index in reversed(timed):
        key = context.once(messages[index], _digest, "decay")
        first = before.get(key, unknown)
        unknown = min(unknown, first) if is_full else now
        ages[index] = now - first
        if len(seen) < _MAX_SEEN:
            seen[key] = first
    context.state[_SEEN] = seen
    return ages


def _digest(message: Message) -> str:
    text = f"{message.get('role')}\0{message.get('tool_call_id')}\0{text_of(message)}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()


def quarantined(message: Message, why: str) -> Message:
    """Return a stub in place of the message, which keeps only what its calls and results need.

    Args:
        why: a short word, as `edit` takes it for a cause.
    """
    stub = _stubbed(message, f"[quarantined: {why}]", "forget", why)
    return message if stub == message else stub


def quarantined_for(message: Message) -> str | None:
    """Return the word in the stub of a message in quarantine; None for any other message."""
    content = message.get("content")
    found = _QUARANTINED.fullmatch(content) if isinstance(content, str) else None
    return found[1] if found is not None else None


def _gone(message: Message, verb: Leaving) -> Message:
    if verb == "quarantine":
        return quarantined(message, VERDICT)
    mode: Mode = "forget" if verb == "forget" else "amortize"
    if leaves_stub(message):
        return _stubbed(message, STUBS[verb], mode, verb)
    return drop(message, mode=mode, cause=verb)


def leaves_stub(message: Message) -> bool:
    """Return True if a stub stays in the place of a removed message: others need it."""
    return bool(
        message.get("role") in RESULT_ROLES
        or message.get("tool_calls")
        or message.get("function_call")
    )


def _stubbed(message: Message, stub: str, mode: Mode, cause: str) -> Message:
    frame = frame_of(message)
    gone = message.keys() - frame.keys()
    return edit(message, stub=stub, mode=mode, cause=cause, without=gone, **frame)


def frame_of(message: Message) -> dict[str, Any]:
    """Return the members of a message that others need once all that it says is gone.

    Those are its role, the tool and the call that a result belongs to, and its own calls: ids,
    types and names of tools, with empty arguments. Everything else may be text for the model.
    """
    names = _OF_RESULTS if message.get("role") in RESULT_ROLES else ("role",)
    frame = {name: message[name] for name in names if isinstance(message.get(name), str)}
    calls, function = message.get("tool_calls"), message.get("function_call")
    if isinstance(calls, list) and calls:
        frame["tool_calls"] = [_frame_of_call(call) for call in calls if isinstance(call, dict)]
    if isinstance(function, dict) and function:
        frame["function_call"] = _frame_of_call(function)
    return frame


def _frame_of_call(call: dict[str, Any]) -> dict[str, Any]:
    named = {key: call[key] for key in ("id", "type", "name") if isinstance(call.get(key), str)}
    bodies = {key: _frame_of_call(call[key]) for key in _BODIES if isinstance(call.get(key), dict)}
    return named | bodies | {key: value for key, value in _NOTHING.items() if key in call}


def _said(message: Message) -> dict[str, Any]:
    noted = message.get(ANNOTATION)
    return noted if isinstance(noted, dict) else {}
