"""A policy's marks on a single edit: its mode, its cause, and its placeholder.

A policy that returns plain messages makes no marks, and its mode holds for all its edits. With
`edit` and `drop` it marks one edit::

    return [edit(m, stub="[cleared]", cause="stale") if stale(m) else m for m in messages]
"""

from __future__ import annotations

import re
from bisect import bisect, bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from leyline_policies.policy import MODES, Message, Mode
from leyline_policies.stubs import Evicted

_CAUSE = re.compile(r"[a-z0-9][a-z0-9_.-]{0,47}")


@dataclass(frozen=True, slots=True)
class Mark:
    """The mark of an edit; None leaves a field to the policy."""

    mode: Mode | None = None
    cause: str | None = None
    """A short name for accounts and metrics, never text of the conversation."""
    stub: bool = False
    """True if a placeholder replaces the content."""
    dropped: bool = False
    evicted: tuple[Evicted, ...] = ()
    """Parts whose stubs the edit wrote into the message."""


class MarkedMessage(dict[str, Any]):
    """An edited message together with the mark of its edit. It compares as a plain one."""

    __slots__ = ("mark", "origin")

    def __init__(self, message: Message, origin: Message, mark: Mark) -> None:
        super().__init__(message)
        self.origin = origin
        """The message that the policy was given."""
        self.mark = mark


def edit(
    message: Message,
    *,
    stub: str | None = None,
    mode: Mode | None = None,
    cause: str | None = None,
    without: Collection[str] = (),
    **members: Any,
) -> Message:
    """Return a copy of ``message`` with ``members`` in place of its own.

    Args:
        stub: text that replaces the content as a placeholder for it.
        mode: the edit's promise, if it isn't the policy's mode.
        cause: the reason, in a word for accounts: small letters, digits, ``_``, ``.`` and ``-``.
        without: members to leave out.

    Raises:
        ValueError: an unknown mode or a cause that isn't such a word.
    """
    edited = MarkedMessage(message, message, _mark(mode, cause, stub=stub is not None))
    for key in without:
        edited.pop(key, None)
    edited.update(members)
    if stub is not None:
        edited["content"] = stub
    return edited


def drop(message: Message, *, mode: Mode | None = None, cause: str | None = None) -> Message:
    """Return a mark for the place of a removed message, to say more of it than its absence.

    Raises:
        ValueError: as `edit`.
    """
    return MarkedMessage(message, message, _mark(mode, cause, dropped=True))


def remark(message: Message, origin: Message, mode: Mode | None) -> Message:
    """Return ``message``, made from ``origin``, with the mode ``mode`` in its mark."""
    mark = replace(mark_of(message) or Mark(), mode=mode)
    return MarkedMessage(message, origin, mark)


def mark_of(message: Message) -> Mark | None:
    """Return the mark of the edit that made ``message``."""
    return message.mark if isinstance(message, MarkedMessage) else None


def marks_since(message: Message, given: Collection[int]) -> Iterator[Mark]:
    """Yield the mark of each edit between a given message and ``message``, the latest first.

    Args:
        given: identities of the given messages.
    """
    while isinstance(message, MarkedMessage) and id(message) not in given:
        yield message.mark
        message = message.origin


def is_dropped(message: Message) -> bool:
    """Return True if `drop` put ``message`` in a list in place of one that is removed."""
    return isinstance(message, MarkedMessage) and message.mark.dropped


def without_dropped(messages: list[Message]) -> list[Message]:
    """Return the messages that stay; the very list if none is removed."""
    if not any(map(is_dropped, messages)):
        return messages
    return [message for message in messages if not is_dropped(message)]


def pair_by_origin(before: Sequence[Message], after: Sequence[Message]) -> list[tuple[int, int]]:
    """Return index pairs of messages of ``after`` and those of ``before`` that they were made from.

    In order, each index at most once, as many as possible. A message of ``after`` may be one of
    ``before``, or made from it with `edit` or `drop`. Messages that a policy moved past others or
    copied by hand aren't paired.
    """
    places: dict[int, list[int]] = {}
    for index, message in enumerate(before):
        places.setdefault(id(message), []).append(index)
    pairs: list[tuple[int, int]] = []
    newest, in_order = -1, True
    for index, message in enumerate(after):
        source: Message = message
        found = places.get(id(source))
        while found is None and isinstance(source, MarkedMessage) and source.origin is not source:
            source = source.origin
            found = places.get(id(source))
        if found is None:
            continue
        # One object may be in several places: then the next one after the last found.
        place = found[0] if len(found) == 1 else found[min(bisect(found, newest), len(found) - 1)]
        in_order = in_order and place > newest
        newest = max(newest, place)
        pairs.append((place, index))
    return pairs if in_order else longest_rising(pairs)


def longest_rising(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the most pairs whose first numbers rise, as their second ones do."""
    ends: list[int] = []  # by length, the smallest number that a run of this length ends with
    last: list[int] = []  # the number of that pair
    previous: list[int | None] = []
    for index, (place, _) in enumerate(pairs):
        length = bisect_left(ends, place)
        if length == len(ends) or place < ends[length]:
            ends[length : length + 1] = [place]
            last[length : length + 1] = [index]
        previous.append(last[length - 1] if length else None)
    chain: list[tuple[int, int]] = []
    at = last[-1] if last else None
    while at is not None:
        chain.append(pairs[at])
        at = previous[at]
    return chain[::-1]


@lru_cache(maxsize=256)
def _mark(
    mode: Mode | None, cause: str | None, *, stub: bool = False, dropped: bool = False
) -> Mark:
    if mode is not None and mode not in MODES:
        raise ValueError(f"mode is {mode!r}; it must be 'amortize' or 'forget'")
    if cause is not None and not _CAUSE.fullmatch(cause):
        raise ValueError(f"cause {cause[:60]!r} is no short word of small letters and digits")
    return Mark(mode, cause, stub, dropped)
