"""Results for single messages and for whole lists, kept from turn to turn."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import compress, count
from operator import ne
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from leyline_policies.changes import Changes, Places
from leyline_policies.conversation import Part, part_of
from leyline_policies.marks import MarkedMessage
from leyline_policies.pairing import Pairing
from leyline_policies.policy import Message

_EPOCH_TURNS = 16
_PAIRINGS = 4
"""Number of lists whose pairs of calls and results are kept, those of the last turn included."""
_PART = "part"
_FEW = 8
"""Number of messages that are looked up one by one; of more, moved ones are found together."""

R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

_Table = dict[Hashable, tuple[object, Any]]
"""Results by the identity of their subject and by its further argument. The subject is kept, so
that no other gets its identity."""


class _Mapped(NamedTuple):
    """A list, its further arguments, and the results for its items; none is changed."""

    subjects: Sequence[Any]
    told: Sequence[Any] | None
    results: list[Any]

    def entries(self) -> _Table:
        """Return the list as a table."""
        identities = map(id, self.subjects)
        names = identities if self.told is None else zip(identities, self.told, strict=True)
        entries = zip(self.subjects, self.results, strict=True)
        return dict(zip(names, entries, strict=True))


_NO_ENTRIES: Mapping[Hashable, tuple[object, Any]] = MappingProxyType({})


class _Edited(NamedTuple):
    """A list, and the same with some of its messages edited; the sets are those of next time."""

    subjects: Sequence[Message]
    places: tuple[int, ...]
    made: Sequence[Message]
    chosen: set[int] | None
    """The places; for the next turn to change, like the next field."""
    differing: set[int] | None
    """Places at which the edited list now has another message."""

    def entries(self) -> Mapping[Hashable, tuple[object, Any]]:
        """Return the result for each, as a table."""
        at = self.places
        return {id(self.subjects[i]): (self.subjects[i], self.made[i]) for i in at}


_UNEDITED = _Edited((), (), (), None, None)


class Memo:
    """Results by message, and by list.

    A message that the conversation held before comes as the very same object, so results are found
    by identity, and a turn costs only its new messages. Results that aren't requested are dropped
    some turns later. For one session; not safe for two threads.
    """

    def __init__(self) -> None:
        self._turns = 0
        self._tables: dict[object, _Table] = {}
        self._past: dict[object, _Table] = {}
        self._lists: dict[object, _Mapped] = {}
        self._edited: dict[object, _Edited] = {}
        self._folded: dict[object, tuple[tuple[Sequence[Any], ...], Any]] = {}
        self._held: dict[object, tuple[Sequence[Any], int | None]] = {}
        self._paired: list[Pairing] = []
        self._pairing_at: dict[str, tuple[Sequence[Message], Pairing]] = {}
        self._changes = Changes()

    def get(self, subject: S, key: object, compute: Callable[[S], T]) -> T:
        """Return ``compute(subject)``, remembered under ``key``."""
        table, past = self._results_of(key)
        entry = table.get(id(subject))
        if entry is None:
            entry = past.get(id(subject)) or (subject, compute(subject))
            table[id(subject)] = entry
        found: T = entry[1]
        return found

    def pairs(
        self, firsts: Sequence[S], seconds: Sequence[R], key: object, compute: Callable[[S, R], T]
    ) -> list[T]:
        """Return ``compute(first, second)`` of each pair, remembered under ``key`` by the identity
        of both."""
        table, past = self._results_of(key)
        names = [*zip(map(id, firsts), map(id, seconds), strict=True)]
        entries = [*map(table.get, names)]
        if None in entries:
            for at, pair in enumerate(zip(firsts, seconds, strict=True)):
                if entries[at] is None:
                    made = past.get(names[at]) or (pair, compute(*pair))
                    entries[at] = table[names[at]] = made
        return [entry[1] for entry in entries if entry is not None]

    def settle(self, subjects: Sequence[Any]) -> None:
        """Declare that a list doesn't change any more, so that comparisons hold for a turn."""
        self._changes.settle(subjects)

    def map(
        self,
        subjects: Sequence[S],
        key: object,
        compute: Callable[..., T],
        place: str = "",
        told: Sequence[Hashable] | None = None,
    ) -> list[T]:
        """Return ``compute(subject)`` of each, remembered under ``key``; not to be changed.

        Items at the same place as in the last list from the same ``place`` aren't looked up one by
        one.

        Args:
            told: a further argument for each subject; then it is ``compute(subject, told)``.
        """
        known = self._lists.get((key, place)) or _Mapped((), None, [])
        if not self._changes.is_settled(subjects):
            subjects = list(subjects)
        size, before = len(subjects), len(known.subjects)
        places = self._changed(known, subjects, told)
        if not places and size == before:
            return known.results
        results = known.results[:size]
        results += [None] * (size - len(results))
        table, past = self._results_of(key)
        if len(places) > _FEW:
            past = {**past, **known.entries()}
        for at in (*places, *range(before, size)):
            subject = subjects[at]
            name = id(subject) if told is None else (id(subject), told[at])
            entry = table.get(name)
            if entry is None:
                made = past.get(name)
                entry = made or (subject, compute(subject, *(() if told is None else (told[at],))))
                table[name] = entry
            results[at] = entry[1]
        self._lists[key, place] = _Mapped(subjects, told, results)
        return results

    def edited(
        self,
        messages: list[Message],
        key: object,
        compute: Callable[[Message], Message],
        places: Sequence[int],
        place: str = "",
    ) -> list[Message]:
        """Return messages with ``compute`` of those at ``places``; the same list if none differs.

        Neither list may be changed. Messages that were edited on the last turn and still are cost
        nothing.
        """
        given, places = messages, tuple(places)
        if not self._changes.is_settled(messages):
            messages = list(messages)
        known = self._edited.pop((key, place), _UNEDITED)
        changed, before = self._changes.between(known.subjects, messages), _NO_ENTRIES
        grown = len(messages) >= len(known.made) and _goes_on(known.places, places)
        if not grown or len(changed) > _FEW:
            known, changed, before = _UNEDITED, (), known.entries()
        chosen, differing = known.chosen or set[int](), known.differing or set[int]()
        fresh = places[len(known.places) :]
        chosen.update(fresh)
        made = [*known.made, *messages[len(known.made) :]]
        todo = {*changed, *fresh, *range(len(known.made), len(messages))}
        table, past = self._results_of(key)
        for at in todo:
            message = made[at] = messages[at]
            if at in chosen:
                entry = table.get(id(message)) or before.get(id(message)) or past.get(id(message))
                entry = entry or (message, compute(message))
                table[id(message)] = entry
                made[at] = entry[1]
            if made[at] is message:
                differing.discard(at)
            else:
                differing.add(at)
        self._changes.settle(made)
        self._changes.note(known.made, made, [at for at in todo if at < len(known.made)])
        self._edited[key, place] = _Edited(messages, places, made, chosen, differing)
        return made if differing else given

    def any(
        self,
        subjects: Sequence[S],
        key: object,
        test: Callable[[S], object],
        place: str = "",
    ) -> bool:
        """Return True if ``test`` holds for any; it is called once for each."""
        if not self._changes.is_settled(subjects):
            subjects = list(subjects)
        known, at = self._held.get((key, place), ((), None))
        if at is not None and at < len(subjects) and self.get(subjects[at], key, test):
            return True
        todo: Iterable[int] = range(len(subjects))
        if at is None:
            todo = (*self._changes.between(known, subjects), *range(len(known), len(subjects)))
        at = next((at for at in todo if self.get(subjects[at], key, test)), None)
        self._held[key, place] = subjects, at
        return at is not None

    def fold(  # noqa: PLR0917
        self,
        items: Sequence[S],
        step: Callable[[T, S], object],
        begin: Callable[[], T],
        key: object,
        place: str = "",
        read: Sequence[Sequence[Any]] = (),
    ) -> T:
        """Return ``begin()``, changed by ``step(state, item)`` for each item in turn.

        If ``items`` continue those of the last time, so does the state.

        Args:
            read: all other input of ``step``, which must continue as well.
        """
        now = (items, *read)
        before, state = self._folded.pop((key, place), ((), None))
        goes_on = bool(before) and all(map(_goes_on, before, now))
        folded: T = state if goes_on else begin()
        # A failed step leaves no trace: the next turn begins again.
        for item in items[len(before[0]) if goes_on else 0 :]:
            step(folded, item)
        kept = tuple(each if type(each) is tuple else [*each] for each in now)
        self._folded[key, place] = kept, folded
        return folded

    def pairing(self, messages: Sequence[Message], place: str = "") -> Pairing:
        """Return calls and results, looked up if an edit changed no call and no result's id."""
        if not self._changes.is_settled(messages):
            return self._pairing_of([*map(self._part_once, messages)])
        last = self._pairing_at.get(place)
        pairing = None if last is None else self._pairing_since(*last, messages)
        if pairing is None:
            parts = self.map(messages, _PART, self._part_of, place)
            pairing = self._pairing_of(parts)
        self._pairing_at[place] = messages, pairing
        return pairing

    def _pairing_since(
        self, known: Sequence[Message], pairing: Pairing, messages: Sequence[Message]
    ) -> Pairing | None:
        """Return ``known``'s pairing, or a newer one that continues it, if ``messages`` has it."""
        places = self._changes.between(known, messages)
        for found in (pairing, *self._paired):
            if len(found.parts) == len(messages) and (found is pairing or found.before is pairing):
                todo = (*places, *range(len(known), len(messages)))
                if all(self._part_once(messages[at]) == found.parts[at] for at in todo):
                    return found
        return None

    def _pairing_of(self, parts: list[Part]) -> Pairing:
        for known in self._paired:
            if known.parts == parts:
                return known
        before = next((each for each in self._paired if each.leads_to(parts)), None)
        pairing = Pairing(parts, before)
        self._paired = [pairing, *self._paired[: _PAIRINGS - 1]]
        return pairing

    def next_turn(self) -> None:
        """Drop what no list of the last turn holds, and now and then all unrequested results."""
        self._changes.next_turn()
        for pairing in self._paired:
            pairing.before = None
        self._turns += 1
        if self._turns % _EPOCH_TURNS == 0:
            self._tables, self._past = {}, self._tables

    def _part_once(self, message: Message) -> Part:
        return self.get(message, _PART, self._part_of)

    def _part_of(self, message: Message) -> Part:
        """Return `part_of`; after an edit, the very object of before, to be compared quickly."""
        part = part_of(message)
        if isinstance(message, MarkedMessage) and message.origin is not message:
            before = self.get(message.origin, _PART, self._part_of)
            return before if before == part else part
        return part

    def _changed(
        self, known: _Mapped, subjects: Sequence[Any], told: Sequence[Any] | None
    ) -> Places:
        """Return the places with another subject, or another further argument."""
        places = self._changes.between(known.subjects, subjects)
        if told is known.told:
            return places
        if told is None or known.told is None:
            return range(min(len(known.subjects), len(subjects)))
        size = min(len(told), len(known.told))
        if told[:size] == known.told[:size]:
            return places
        others = compress(count(), map(ne, told, known.told))
        return sorted({*places, *others})

    def _results_of(self, key: object) -> tuple[_Table, _Table]:
        """Return the results under ``key``, and those that are dropped unless requested."""
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = {}
        return table, self._past.get(key) or {}


def _goes_on(before: Sequence[Any], now: Sequence[Any]) -> bool:
    """Return True if ``now`` begins with what was there before, by value."""
    size = len(before)
    return size <= len(now) and now[:size] == before
