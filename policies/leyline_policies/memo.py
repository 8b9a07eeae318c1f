"""What was computed of single messages, kept from turn to turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import islice
from operator import is_
from typing import Any, TypeVar

from leyline_policies.conversation import Part, ToolCall, pair_parts, part_of
from leyline_policies.policy import Message

_EPOCH_TURNS = 16
_PAIRINGS = 3
"""Lists of a turn whose pairs of calls and results are remembered."""
_PART = "part"

S = TypeVar("S")
T = TypeVar("T")

_Table = dict[int, tuple[object, Any]]
"""Results by the identity of what they were computed of, which is held so that no other gets it."""


class Pairing:
    """Calls with what answers them, and where results are, oldest first; found when asked for."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts

    @cached_property
    def calls(self) -> tuple[ToolCall, ...]:
        """Every call in order."""
        return pair_parts(self._parts)

    @cached_property
    def results(self) -> tuple[int, ...]:
        """Indices of the messages that are results."""
        return tuple(index for index, part in enumerate(self._parts) if isinstance(part, str))


class Memo:
    """Results by message.

    A message that the conversation held before comes as the very same object, so results are found
    by identity, and a turn costs what is new in it. What isn't asked for is gone some turns later.
    For one session; not safe for two threads.
    """

    def __init__(self) -> None:
        self._turns = 0
        self._tables: dict[object, _Table] = {}
        self._past: dict[object, _Table] = {}
        self._lists: dict[object, tuple[list[Any], list[Any]]] = {}
        self._paired: list[tuple[list[Part], Pairing]] = []

    def get(self, subject: S, key: object, compute: Callable[[S], T]) -> T:
        """``compute(subject)``, remembered under ``key``."""
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = {}
        entry = table.get(id(subject))
        if entry is None:
            entry = self._past.get(key, {}).get(id(subject)) or (subject, compute(subject))
            table[id(subject)] = entry
        found: T = entry[1]
        return found

    def map(
        self, subjects: Sequence[S], key: object, compute: Callable[[S], T], place: str = ""
    ) -> list[T]:
        """``compute`` of each, remembered under ``key``; not to be changed.

        What a list has in common, at both ends, with the last one from the same ``place`` isn't
        looked at one by one.
        """
        subjects = list(subjects)
        known, results = self._lists.get((key, place), ([], []))
        head = _agreement(known, subjects)
        if head == len(known) == len(subjects):
            return results
        longest = min(len(known), len(subjects)) - head
        tail = _agreement(islice(reversed(known), longest), reversed(subjects)) if longest else 0
        end = len(subjects) - tail
        # In between, single messages were edited in their places.
        aligned = zip(subjects[head:end], known[head:], results[head:], strict=False)
        middle = [
            result if subject is before else self.get(subject, key, compute)
            for subject, before, result in aligned
        ]
        rest = subjects[head + len(middle) : end]
        middle += [self.get(subject, key, compute) for subject in rest]
        found = [*results[:head], *middle, *results[len(known) - tail :]]
        self._lists[key, place] = (subjects, found)
        return found

    def pairing(self, messages: Sequence[Message], place: str = "") -> Pairing:
        """Calls and results, looked up where an edit changed no call and no result's id."""
        parts = self.map(messages, _PART, part_of, place)
        for known, found in self._paired:
            if known == parts:
                return found
        pairing = Pairing(parts)
        self._paired = [(parts, pairing), *self._paired[: _PAIRINGS - 1]]
        return pairing

    def next_turn(self) -> None:
        """Forget, now and then, what long wasn't asked for."""
        self._turns += 1
        if self._turns % _EPOCH_TURNS == 0:
            self._tables, self._past = {}, self._tables


def _agreement(left: Iterable[object], right: Iterable[object]) -> int:
    """How many objects both begin with."""
    same = bytes(map(is_, left, right))
    differs = same.find(0)
    return len(same) if differs < 0 else differs
