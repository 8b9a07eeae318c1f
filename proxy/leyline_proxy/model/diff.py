"""Differences between two message lists."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from rapidfuzz.distance import LCSseq

from .messages import Message, call_ids, fingerprint, text_of

MAX_COMPARED_CELLS = 1 << 26
"""Largest middle (old messages x new ones) that is compared, with 8 MB of bits; larger ones count
as different throughout."""

StepKind = Literal["kept", "removed", "inserted", "replaced"]
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class CharEdit:
    """Characters ``[start, end)`` of the old text became ``replacement``."""

    start: int
    end: int
    replacement: str


class Step(NamedTuple):
    """One message's fate; ``old`` and ``new`` are indices into the two lists."""

    kind: StepKind
    old: int | None
    new: int | None
    chars: tuple[CharEdit, ...] = ()
    """Edits to a replaced message's text; empty if only other members changed."""


@dataclass(frozen=True, slots=True)
class MessageDiff:
    """Steps in list order. Every index of both lists occurs in exactly one step."""

    steps: tuple[Step, ...]


def diff_messages(
    old: Sequence[Message],
    new: Sequence[Message],
    old_fingerprints: Sequence[int] | None = None,
    new_fingerprints: Sequence[int] | None = None,
) -> MessageDiff:
    """Return the steps from one message list to another.

    The longest common subsequence of equal messages is kept. Between two kept messages, a removed
    and an inserted one with the same role, tool call id and tool calls become one ``replaced``.

    Args:
        old: the earlier list.
        new: the later list.
        old_fingerprints: :func:`fingerprint` of each old message, where already known.
        new_fingerprints: likewise.
    """
    before = (
        old_fingerprints
        if old_fingerprints is not None
        else [fingerprint(message) for message in old]
    )
    after = (
        new_fingerprints
        if new_fingerprints is not None
        else [fingerprint(message) for message in new]
    )
    steps: list[Step] = []
    old_at = new_at = 0
    for i, j in [*common_subsequence(before, after), (len(old), len(new))]:
        if old_at < i or new_at < j:
            steps.extend(_gap(old, new, range(old_at, i), range(new_at, j)))
        if i < len(old):
            steps.append(Step("kept", i, j))
        old_at, new_at = i + 1, j + 1
    return MessageDiff(tuple(steps))


def apply_diff(old: Sequence[Message], diff: MessageDiff, new: Sequence[Message]) -> list[Message]:
    """Return the later list, built from the earlier one and the messages that ``new`` supplies.

    The result equals ``new`` up to volatile markers.
    """
    result: list[Message] = []
    for step in diff.steps:
        if step.kind == "kept" and step.old is not None:
            result.append(old[step.old])
        elif step.new is not None:
            result.append(new[step.new])
    return result


def apply_chars(text: str, edits: Sequence[CharEdit]) -> str:
    """Return ``text`` after sorted, disjoint character edits."""
    parts: list[str] = []
    cursor = 0
    for edit in edits:
        parts += (text[cursor : edit.start], edit.replacement)
        cursor = edit.end
    return "".join((*parts, text[cursor:]))


def common_subsequence(left: Sequence[_Key], right: Sequence[_Key]) -> list[tuple[int, int]]:
    """Return the index pairs of a longest common subsequence, in order.

    If the differing middles exceed :data:`MAX_COMPARED_CELLS`, the result holds only the common
    beginning and end.
    """
    shared = min(len(left), len(right))
    prefix = 0
    while prefix < shared and left[prefix] == right[prefix]:
        prefix += 1
    suffix = 0
    while suffix < shared - prefix and left[-1 - suffix] == right[-1 - suffix]:
        suffix += 1
    pairs = [(index, index) for index in range(prefix)]
    middle_left = left[prefix : len(left) - suffix]
    middle_right = right[prefix : len(right) - suffix]
    if len(middle_left) * len(middle_right) <= MAX_COMPARED_CELLS:
        pairs += [(prefix + i, prefix + j) for i, j in _longest(middle_left, middle_right)]
    pairs += [(len(left) - step, len(right) - step) for step in range(suffix, 0, -1)]
    return pairs


def _longest(left: Sequence[_Key], right: Sequence[_Key]) -> Iterator[tuple[int, int]]:
    # Map keys to small numbers: the library compares hashes, and these can't collide.
    numbers: dict[_Key, int] = {}
    numbered = [
        [numbers.setdefault(key, len(numbers)) for key in sequence] for sequence in (left, right)
    ]
    for block in LCSseq.opcodes(*numbered):
        if block.tag == "equal":
            yield from zip(
                range(block.src_start, block.src_end),
                range(block.dest_start, block.dest_end),
                strict=True,
            )


def _gap(
    old: Sequence[Message], new: Sequence[Message], removed: range, inserted: range
) -> list[Step]:
    """Return the steps between two kept messages."""
    pairs: list[tuple[int, int]] = []
    if removed and inserted:
        pairs = [
            (removed[i], inserted[j])
            for i, j in common_subsequence(
                [_pairing_key(old[index]) for index in removed],
                [_pairing_key(new[index]) for index in inserted],
            )
        ]
    steps: list[Step] = []
    old_at, new_at = removed.start, inserted.start
    for i, j in [*pairs, (removed.stop, inserted.stop)]:
        steps += [Step("removed", index, None) for index in range(old_at, i)]
        steps += [Step("inserted", None, index) for index in range(new_at, j)]
        if i < removed.stop:
            steps.append(Step("replaced", i, j, _char_edits(text_of(old[i]), text_of(new[j]))))
        old_at, new_at = i + 1, j + 1
    return steps


def _pairing_key(message: Message) -> Hashable:
    identifier = message.get("tool_call_id")
    return (
        message.get("role"),
        identifier if isinstance(identifier, str) else None,
        call_ids(message),
    )


def _char_edits(old: str, new: str) -> tuple[CharEdit, ...]:
    if old == new:
        return ()
    shared = min(len(old), len(new))
    prefix = _common_length(lambda length: old[:length] == new[:length], shared)
    suffix = _common_length(
        lambda length: old[len(old) - length :] == new[len(new) - length :], shared - prefix
    )
    return (CharEdit(prefix, len(old) - suffix, new[prefix : len(new) - suffix]),)


def _common_length(equal: Callable[[int], bool], limit: int) -> int:
    """Return the largest length up to ``limit`` at which the monotone ``equal`` holds."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if equal(middle):
            low = middle
        else:
            high = middle - 1
    return low
