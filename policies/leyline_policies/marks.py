"""What a policy says about a single edit: how it reaches the cache, why, and what took its place.

A policy that returns plain messages says nothing, and its mode holds for all it changed. With
`edit` and `drop` it says more of one change::

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

_CAUSE = re.compile(r"[a-z0-9][a-z0-9_.-]{0,47}")


@dataclass(frozen=True, slots=True)
class Mark:
    """What is said of an edit; None leaves it to the policy."""

    mode: Mode | None = None
    cause: str | None = None
    """A short name for accounts and metrics, never text of the conversation."""
    stub: bool = False
    """Whether a placeholder stands where the content was."""
    dropped: bool = False


class MarkedMessage(dict[str, Any]):
    """An edited message together with what is said of the edit. It compares as a plain one."""

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
    """A copy of ``message`` with ``members`` in place of its own.

    Args:
        stub: text that replaces the content as a placeholder for it.
        mode: what the edit promises, where that isn't the policy's mode.
        cause: why, in a word for accounts: small letters, digits, ``_``, ``.`` and ``-``.
        without: members to leave out.

    Raises:
        ValueError: an unknown mode or a cause that is no such word.
    """
    edited = MarkedMessage(message, message, _mark(mode, cause, stub=stub is not None))
    for key in without:
        edited.pop(key, None)
    edited.update(members)
    if stub is not None:
        edited["content"] = stub
    return edited


def drop(message: Message, *, mode: Mode | None = None, cause: str | None = None) -> Message:
    """What to return in the place of a message that is to go, to say more of it than its absence.

    Raises:
        ValueError: as `edit`.
    """
    return MarkedMessage(message, message, _mark(mode, cause, dropped=True))


def remark(message: Message, origin: Message, mode: Mode | None) -> Message:
    """``message``, made from ``origin``, with the mode ``mode`` in its mark."""
    mark = replace(mark_of(message) or Mark(), mode=mode)
    return MarkedMessage(message, origin, mark)


def mark_of(message: Message) -> Mark | None:
    """What was said of the edit that made ``message``."""
    return message.mark if isinstance(message, MarkedMessage) else None


def marks_since(message: Message, given: Collection[int]) -> Iterator[Mark]:
    """What was said of each edit between a given message and ``message``, the latest first.

    Args:
        given: identities of the messages that were given.
    """
    while isinstance(message, MarkedMessage) and id(message) not in given:
        yield message.mark
        message = message.origin


def is_dropped(message: Message) -> bool:
    """Whether `drop` put ``message`` in a list in place of one that goes."""
    return isinstance(message, MarkedMessage) and message.mark.dropped


def without_dropped(messages: list[Message]) -> list[Message]:
    """The messages that stay; the very list where none is to go."""
    if not any(map(is_dropped, messages)):
        return messages
    return [message for message in messages if not is_dropped(message)]


def pair_by_origin(before: Sequence[Message], after: Sequence[Message]) -> list[tuple[int, int]]:
    """Which message of ``after`` is, or was made with `edit` or `drop` from, which of ``before``.

    Index pairs in order, each index at most once, as many as there can be. What a policy moved
    past others or copied by hand isn't paired.
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
        # One object may stand in several places: then the next one behind the last found.
        place = found[0] if len(found) == 1 else found[min(bisect(found, newest), len(found) - 1)]
        in_order = in_order and place > newest
        newest = max(newest, place)
        pairs.append((place, index))
    return pairs if in_order else longest_rising(pairs)


def longest_rising(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The most pairs whose first numbers rise, as their second ones do."""
    ends: list[int] = []  # by length, the smallest number that a run of this length ends with
    last: list[int] = []  # which pair that is
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
