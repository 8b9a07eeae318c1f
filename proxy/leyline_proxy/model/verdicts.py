"""Verdicts of a session: messages that are in quarantine for as long as it lives, without their
text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Literal, TypeVar

from .prepared import POLICY
from .spans import SpanName

MAX_VERDICTS = 1024
"""Largest number per session."""

_MAX_FORMS = 8
"""Largest number of names, and of texts, by which one message is known."""

_Item = TypeVar("_Item")
By = Literal["api", "annotation", "policy"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A message in quarantine."""

    spans: tuple[str, ...]
    """Its names in the engine's ledger, the first one first."""
    prints: tuple[int, ...]
    """Keyed hashes of its forms; none while no request has shown it."""
    policy: str
    """The policy of the edit that takes it out, and the word for its cause and in its stub."""
    why: str
    by: By
    turn: str = ""
    """Name of the turn that brought the verdict; empty if none did."""
    message: int | None = None
    """Index in the client's list then."""
    role: str = ""

    @property
    def cause(self) -> str:
        """The cause of its edits."""
        return f"{POLICY}:{self.policy}:{self.why}"

    @property
    def span(self) -> str:
        """The message's first name."""
        return self.spans[0]


class VerdictIndex:
    """Finds the verdict on a message."""

    def __init__(self, verdicts: Iterable[Verdict]) -> None:
        self._known: dict[object, Verdict] = {}
        self._unseen: dict[str, Verdict] = {}
        for each in verdicts:
            self._known.update(dict.fromkeys((*each.spans, *each.prints), each))
            if not each.prints:
                self._unseen.update(dict.fromkeys(each.spans, each))

    def find(self, name: SpanName, value: int) -> Verdict | None:
        """Return the verdict on a message with that text or that name.

        A verdict on a message that no request has shown is on all that may have become of it.

        Args:
            value: the message's keyed hash.
        """
        known = self._known.get(value) or self._known.get(name.id)
        if known is not None or not self._unseen:
            return known
        return next((self._unseen[each] for each in name.former if each in self._unseen), None)


def keyed_print(fingerprint: int, key: bytes) -> int:
    """Return the keyed hash of a message's fingerprint; without the key, no text can be tried."""
    state = blake2b(fingerprint.to_bytes(8, "little"), key=key, digest_size=8, person=b"verdict")
    return int.from_bytes(state.digest(), "little")


def with_verdicts(known: Sequence[Verdict], found: Iterable[Verdict]) -> tuple[Verdict, ...]:
    """Return the known verdicts with those found.

    A verdict that is known remains, with the names and forms that it was found under. If there are
    too many, the oldest of policies go, which judge each message on each turn, and then the newest.
    """
    merged = list(known)
    places: dict[object, int] = {
        mark: at for at, each in enumerate(merged) for mark in (*each.spans, *each.prints)
    }
    for each in found:
        marks = (*each.spans, *each.prints)
        at = next((places[mark] for mark in marks if mark in places), len(merged))
        if at == len(merged):
            merged.append(each)
        old = merged[at]
        if old.by == "policy" != each.by:
            old = replace(old, by=each.by)  # the caller's own word stays
        spans, prints = _joined(old.spans, each.spans), _joined(old.prints, each.prints)
        merged[at] = replace(old, spans=spans, prints=prints)
        places.update(dict.fromkeys(marks, at))
    excess = len(merged) - MAX_VERDICTS
    if excess > 0:
        spare = {at for at, each in enumerate(merged) if each.by == "policy"}
        gone = set(sorted(spare)[:excess])
        merged = [each for at, each in enumerate(merged) if at not in gone]
    return tuple(merged[:MAX_VERDICTS])


def demanded(verdicts: Iterable[Verdict]) -> int:
    """Return the number of verdicts that no policy would find again."""
    return sum(each.by != "policy" for each in verdicts)


def _joined(old: tuple[_Item, ...], new: tuple[_Item, ...]) -> tuple[_Item, ...]:
    """Return the first item and the newest others."""
    every = tuple(dict.fromkeys((*old, *new)))
    return every if len(every) <= _MAX_FORMS else (every[0], *every[1 - _MAX_FORMS :])
