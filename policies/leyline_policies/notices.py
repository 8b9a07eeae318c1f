"""Notices: notes to the model on messages that a policy removed.

A policy with the setting ``notices`` leaves one where it removes messages::

    [Here, 12 messages (~2314 tokens) of the history were dropped by sliding_window. ...]

The note is in a message beside the gap that the model answers, and changes only when the gap does:
so it costs the cache nothing that the removal hasn't cost already. Text that is shortened in its
place needs none: its placeholder says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from operator import is_

from leyline_policies.alignment import align_changed, identities
from leyline_policies.compose import Wrapper
from leyline_policies.context import Context, run
from leyline_policies.conversation import BEARERS
from leyline_policies.marks import MarkedMessage, edit, is_dropped, mark_of
from leyline_policies.policy import Message, Policy

SUMMARY = "summary"
"""Cause in the mark of an edit that put in a summary."""

_CAUSE = "notice"


@dataclass(frozen=True, slots=True)
class Notices(Wrapper):
    """A policy that leaves a note where it removes messages."""

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the inner policy's messages, with notices."""
        edited = run(self.policy, messages, turn_idx, context.inner(self.policy.name))
        if edited is messages:
            return messages
        given = set(map(id, messages))
        borne: dict[int, _Gap] = {}
        for gap in _gaps(messages, edited):
            at = _bearer(gap, edited)
            if at is not None:
                borne[at] = gap.joined(borne.get(at))
        result = list(edited)
        for at, gap in borne.items():
            noted = self._noted(result[at], gap, context, id(result[at]) in given)
            result[at] = result[at] if noted is None else noted
        return edited if all(map(is_, edited, result)) else result

    def _noted(self, bearer: Message, gap: _Gap, context: Context, layer: bool) -> Message | None:
        """Return the message with the notice of a gap; None if the notice is the longer."""
        removed = context.total(gap.removed)
        note = notice(len(gap.removed), removed, self.policy.name, summarized=gap.summarized)
        if removed <= context.count({"role": "user", "content": note}):
            return None
        bear = partial(_with_notice, note=note, layer=layer)
        return context.once(bearer, bear, (_CAUSE, layer, note))


def notices(policy: Policy) -> Policy:
    """Return ``policy`` with a note wherever it removes messages.

    Raises:
        ValueError: the policy forgets.
    """
    if policy.mode == "forget":
        raise ValueError(
            f"notices=true: {policy.name} forgets, and a note is an edit that it would forget, "
            "too; leave out notices"
        )
    return Notices(policy)


def notice(messages: int, tokens: int, policy: str, *, summarized: bool = False) -> str:
    """Return the text of a notice, which depends on its arguments alone."""
    count = "1 message" if messages == 1 else f"{messages} messages"
    done = "summarized" if summarized else "dropped"
    left = "The summary is secondhand" if summarized else "They are no longer in your context"
    return (
        f"[Here, {count} (~{tokens} tokens) of the history were {done} by {policy}. {left}; "
        "verify critical facts again at their sources.]"
    )


@dataclass(frozen=True, slots=True)
class _Gap:
    """Messages that are gone from one place."""

    at: int
    """Place in the edited list before which they were."""
    removed: tuple[Message, ...]
    put_in: tuple[int, ...] = ()
    """Places of messages that the policy put in for them."""
    summarized: bool = False

    def joined(self, other: _Gap | None) -> _Gap:
        """Return the gap with another one, before it, that the same message reports."""
        if other is None:
            return self
        summarized = self.summarized or other.summarized
        return _Gap(self.at, other.removed + self.removed, self.put_in, summarized)


def _gaps(messages: Sequence[Message], edited: Sequence[Message]) -> Iterator[_Gap]:
    """Yield the places where messages are gone."""
    if len(messages) == len(edited) and all(map(_in_place, messages, edited)):
        return
    found, first, last = align_changed(messages, edited)
    kept = [(old, new) for old, new in found if not is_dropped(edited[new])]
    moved = {
        each for m in edited[first[1] + 1 : last[1]] if not is_dropped(m) for each in identities(m)
    }
    for (old, new), (next_old, next_new) in pairwise([first, *kept, last]):
        removed = tuple(m for m in messages[old + 1 : next_old] if id(m) not in moved)
        if removed:
            put_in = tuple(at for at in range(new + 1, next_new) if not is_dropped(edited[at]))
            beside = [edited[at] for at in (new, next_new) if 0 <= at < len(edited)]
            summarized = bool(put_in) or any(map(_is_summary, beside))
            yield _Gap(next_new, removed, put_in, summarized)


def _in_place(old: Message, new: Message) -> bool:
    return new is old or (not is_dropped(new) and id(old) in identities(new))


def _is_summary(message: Message) -> bool:
    mark = mark_of(message)
    return mark is not None and mark.cause == SUMMARY


def _bearer(gap: _Gap, edited: Sequence[Message]) -> int | None:
    """Return the place of the message that bears the notice of a gap.

    It is one that was put in for the gap, the last before it, or the first after it: a choice that
    nothing but the gap decides, so that it stays from turn to turn.
    """
    places = chain(gap.put_in, range(gap.at - 1, -1, -1), range(gap.at, len(edited)))
    return next((at for at in places if _bears(edited[at])), None)


def _bears(message: Message) -> bool:
    return message.get("role") in BEARERS and not is_dropped(message)


def _with_notice(message: Message, note: str, layer: bool) -> Message:
    """Return a message with a notice after its content.

    Args:
        layer: True if the policy hasn't edited it.
    """
    content = message.get("content")
    if isinstance(content, list):
        content = [*content, {"type": "text", "text": f"\n{note}"}]
    else:
        content = f"{content}\n\n{note}" if isinstance(content, str) and content else note
    if layer or not isinstance(message, MarkedMessage):
        return edit(message, content=content, cause=_CAUSE)
    return MarkedMessage({**message, "content": content}, message.origin, message.mark)
