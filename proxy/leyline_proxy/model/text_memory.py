"""Results for texts that are remembered together with the sessions whose prompts have the texts.

All sessions share a result, and a forget of one of them drops what it has used. That costs others
at most the same work again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

Owner = tuple[str, str]
"""Tenant and session."""


class Reader(NamedTuple):
    """A session whose prompt has a text."""

    tenant: str
    session: str = ""
    """Empty if it isn't known: any forget of its tenant reaches the text."""
    demands: int = 0
    """See ``Session.demands``, when the turn was planned."""

    @property
    def owner(self) -> Owner:
        """The session, whatever it has demanded."""
        return self.tenant, self.session


NO_SESSION = Reader("")
"""The reader of texts that are of no tenant."""


class Left(NamedTuple):
    """Entries of a session, as a proof counts them."""

    before: int = 0
    """Those of before its forget."""
    again: int = 0

    def __add__(self, other: object) -> Left:
        """Return both together."""
        if not isinstance(other, Left):
            return NotImplemented
        return Left(self.before + other.before, self.again + other.again)


def left_of(demands: Sequence[int], now: int) -> Left:
    """Return the count of entries by the demands of their readers."""
    before = sum(each < now for each in demands)
    return Left(before, len(demands) - before)


def forgotten_with(tenant: str, session: str) -> tuple[Owner, Owner]:
    """Return the owners whose texts a session's forget reaches."""
    return (tenant, session), (tenant, "")


@dataclass(slots=True)
class _Held(Generic[V]):
    value: V
    weight: int
    readers: set[Owner] = field(default_factory=set)


class TextMemory(Generic[K, V]):
    """A memory of results by text, the least recently used out first. Safe for several threads.

    Args:
        max_weight: bound of the weights that its users give.
        reader_weight: weight of each further reader of a text.
    """

    def __init__(self, max_weight: int, *, reader_weight: int = 0) -> None:
        self.lock = RLock()
        self._max_weight = max_weight
        self._reader_weight = reader_weight
        self._weight = 0
        self._held: OrderedDict[K, _Held[V]] = OrderedDict()
        self._of: dict[Owner, dict[K, int]] = {}
        """The texts of each session, and the demands of the latest turn that used one."""

    def __len__(self) -> int:
        return len(self._held)

    @property
    def weight(self) -> int:
        """The weight of all that is remembered now."""
        return self._weight

    def find(self, keys: Sequence[K], reader: Reader) -> list[V | None]:
        """Return the value of each text, or None."""
        with self.lock:
            found = [self._held.get(key) for key in keys]
            for key, held in zip(keys, found, strict=True):
                if held is not None:
                    self._held.move_to_end(key)
                    self._note(key, held, reader)
            self._shrink()
        return [held.value if held is not None else None for held in found]

    def get(self, key: K) -> V | None:
        """Return the value of a text without counting it as used."""
        held = self._held.get(key)
        return held.value if held is not None else None

    def put(self, key: K, value: V, weight: int, reader: Reader) -> V:
        """Remember a value unless there is one; return the remembered one."""
        with self.lock:
            held = self._held.get(key)
            if held is None:
                held = self._held[key] = _Held(value, weight)
                self._weight += weight
            self._note(key, held, reader)
            self._shrink()
        return held.value

    def grow(self, key: K, weight: int) -> None:
        """Note that a remembered value has become heavier."""
        with self.lock:
            self._held[key].weight += weight
            self._weight += weight
            self._shrink()

    def forget(self, tenant: str, session: str, demands: int | None = None) -> None:
        """Drop the texts of a session.

        Args:
            demands: only what turns up to these demands have used; None for all.
        """
        with self.lock:
            for owner in forgotten_with(tenant, session):
                own = self._of.get(owner, {})
                for key in [key for key, at in own.items() if demands is None or at <= demands]:
                    self._drop(key)

    def left(self, tenant: str, session: str, demands: int) -> Left:
        """Return the number of a session's texts; see ``KeptText.left``."""
        with self.lock:
            return left_of([*self._of.get((tenant, session), {}).values()], demands)

    def _note(self, key: K, held: _Held[V], reader: Reader) -> None:
        owner = reader.owner
        if owner not in held.readers:
            if held.readers:
                held.weight += self._reader_weight
                self._weight += self._reader_weight
            held.readers.add(owner)
        self._of.setdefault(owner, {})[key] = reader.demands

    def _shrink(self) -> None:
        while self._weight > self._max_weight and self._held:
            self._drop(next(iter(self._held)))

    def _drop(self, key: K) -> None:
        held = self._held.pop(key)
        self._weight -= held.weight
        for owner in held.readers:
            own = self._of[owner]
            del own[key]
            if not own:
                del self._of[owner]
