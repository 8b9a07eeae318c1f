"""What a policy says about a single edit: how it reaches the cache, why, and what took its place.

A policy that returns plain messages says nothing, and its mode holds for all it changed. With
`edit` and `drop` it says more of one change::

    return [edit(m, stub="[cleared]", cause="stale") if stale(m) else m for m in messages]
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
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
    mark = _mark(mode, cause, stub=stub is not None)
    edited = {key: value for key, value in message.items() if key not in without}
    edited.update(members)
    if stub is not None:
        edited["content"] = stub
    return MarkedMessage(edited, message, mark)


def drop(message: Message, *, mode: Mode | None = None, cause: str | None = None) -> Message:
    """What to return in the place of a message that is to go, to say more of it than its absence.

    Raises:
        ValueError: as `edit`.
    """
    return MarkedMessage(message, message, _mark(mode, cause, dropped=True))


def mark_of(message: Message) -> Mark | None:
    """What was said of the edit that made ``message``."""
    return message.mark if isinstance(message, MarkedMessage) else None


def is_dropped(message: Message) -> bool:
    """Whether `drop` put ``message`` in a list in place of one that goes."""
    return isinstance(message, MarkedMessage) and message.mark.dropped


def without_dropped(messages: Sequence[Message]) -> list[Message]:
    """The messages that stay."""
    return [message for message in messages if not is_dropped(message)]


def pair_by_origin(before: Sequence[Message], after: Sequence[Message]) -> list[tuple[int, int]]:
    """Which message of ``after`` is, or was made with `edit` or `drop` from, which of ``before``.

    Index pairs in order, each index at most once. What a policy moved or copied by hand isn't
    paired.
    """
    place = {id(message): index for index, message in enumerate(before)}
    pairs: list[tuple[int, int]] = []
    last = -1
    for index, message in enumerate(after):
        source: Message = message
        found = place.get(id(source))
        while found is None and isinstance(source, MarkedMessage):
            source = source.origin
            found = place.get(id(source))
        if found is not None and found > last:
            pairs.append((found, index))
            last = found
    return pairs


def _mark(
    mode: Mode | None, cause: str | None, *, stub: bool = False, dropped: bool = False
) -> Mark:
    if mode is not None and mode not in MODES:
        raise ValueError(f"mode is {mode!r}; it must be 'amortize' or 'forget'")
    if cause is not None and not _CAUSE.fullmatch(cause):
        raise ValueError(f"cause {cause[:60]!r} is no short word of small letters and digits")
    return Mark(mode, cause, stub, dropped)
