"""Check of a chain, with the kind of damage to a broken one. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal

import msgspec

from .chain import GENESIS, AuditKey, Head, Line, is_sealed, read_line

Damage = Literal["edited", "removed", "inserted", "reordered", "truncated", "torn", "unreadable"]

MAX_TORN = 64
"""Largest number of consecutive pieces of lines that one record may account for."""

OPENERS = frozenset({"rotate"})
"""Kinds of the first record of a file that continues another one."""


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """The first bad line."""

    damage: Damage
    line: int
    """Number in its file, from 1; for missing lines, the number of the one after the gap."""
    why: str


@dataclass(slots=True)
class Checked:
    """The results for a chain so far; continued from file to file."""

    head: Head | None = None
    """None before the first line."""
    first_seq: int = 0
    records: int = 0
    torn: int = 0
    """Number of pieces of lines that a crash left, each accounted for by a record."""
    lost: int = 0
    """Number of records that were never written, by the log's own account."""
    oldest: int | None = None
    """Number of the oldest file kept when the newest one was begun."""
    before: int = 0
    """Number of the file before the first one; 0 if it begins the log."""
    wanted: set[str] = field(default_factory=set)
    """Required hashes that haven't been found yet."""
    finding: AuditFinding | None = None


def torn_account(pieces: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return a record's account of pieces of lines: their sizes and hashes."""
    return [{"bytes": len(piece), "sha256": sha256(piece).hexdigest()} for piece in pieces]


def number_before(before: Any) -> int:
    """Return the number of the file that a record of a rotation names; 0 for none."""
    name = before.get("file") if isinstance(before, dict) else None
    suffix = str(name).rpartition(".")[2]
    return int(suffix) if re.fullmatch("[0-9]+", suffix) else 0


def check_file(data: bytes, checked: Checked, keys: Sequence[AuditKey]) -> None:
    """Continue with a whole file; stop at the first bad line, which is recorded.

    Args:
        keys: each line must be sealed with one of them; without any, by its bare hash.
    """
    lines = data.split(b"\n")
    tail = lines.pop()
    walk = _Walk(lines, checked, keys or (None,))
    checked.finding = walk.run()
    if checked.finding is None and tail:
        checked.finding = AuditFinding("torn", len(lines) + 1, _TORN_WHY)


_TORN_WHY = "the last line is incomplete: a crash that no start has noted yet, or a cut"


class _Walk:
    """One file's lines, checked against the chain before them."""

    def __init__(
        self, lines: Sequence[bytes], checked: Checked, keys: Sequence[AuditKey | None]
    ) -> None:
        self._lines = lines
        self._checked = checked
        self._keys = list(keys)

    def run(self) -> AuditFinding | None:
        """Return the first bad line."""
        at = 0
        while at < len(self._lines):
            line = self._sealed(at)
            if line is None:
                skipped = self._torn(at)
                if not skipped:
                    return self._unsealed(at)
                self._checked.torn += skipped
                at += skipped
                continue
            finding = self._place(at, line) or self._content(at, line)
            if finding is not None:
                return finding
            at += 1
        return None

    def _sealed(self, at: int) -> Line | None:
        """Return the line if its hash is right."""
        raw = self._lines[at] if at < len(self._lines) else b""
        for place, key in enumerate(self._keys):
            if is_sealed(raw, key):
                # The next line probably has the same key.
                self._keys.insert(0, self._keys.pop(place))
                return read_line(raw)
        return None

    def _follows(self, line: Line) -> bool:
        head = self._checked.head
        if head is None:
            return (line.seq, line.prev) == (1, GENESIS) or line.kind in OPENERS
        return line.seq == head.seq + 1 and line.prev == head.hash

    def _torn(self, at: int) -> int:
        """Return the number of pieces of lines from here on that the next record accounts for."""
        end = at
        while end < len(self._lines) and end - at <= MAX_TORN and self._sealed(end) is None:
            end += 1
        line = self._sealed(end)
        if line is None or line.kind != "recovered":
            return 0
        record = msgspec.json.decode(self._lines[end])
        fits = self._follows(line) or (self._checked.head is None and record.get("opens") is True)
        same = record.get("torn") == torn_account(self._lines[at:end])
        return end - at if fits and same else 0

    def _unsealed(self, at: int) -> AuditFinding:
        following = self._sealed(at + 1)
        if following is not None and self._follows(following):
            why = "a line that is not of this chain, between two that belong together"
            return AuditFinding("inserted", at + 1, why)
        return AuditFinding("edited", at + 1, "the line is not what its hash was taken over")

    def _place(self, at: int, line: Line) -> AuditFinding | None:
        """Return the fault in a sealed line's place."""
        checked, number = self._checked, at + 1
        if checked.head is None:
            if self._follows(line) or self._opens_torn(at, line):
                checked.first_seq = line.seq
                return None
            return AuditFinding(
                "removed", number, f"begins with record {line.seq}, which begins no log"
            )
        return None if self._follows(line) else self._misplaced(number, line, checked.head.seq + 1)

    def _misplaced(self, number: int, line: Line, expected: int) -> AuditFinding:
        if line.seq == expected:
            why = f"the line before record {line.seq} is not the one that it names: sealed anew"
            return AuditFinding("edited", max(1, number - 1), why)
        if line.seq < expected:
            return AuditFinding("inserted", number, f"record {line.seq} stands here again")
        if expected in self._later(number):
            return AuditFinding("reordered", number, f"record {line.seq} stands before {expected}")
        last = line.seq - 1
        gone = f"record {last} is" if last == expected else f"records {expected} to {last} are"
        return AuditFinding("removed", number, f"{gone} missing")

    def _opens_torn(self, at: int, line: Line) -> bool:
        return (
            at > 0
            and line.kind == "recovered"
            and msgspec.json.decode(self._lines[at]).get("opens") is True
        )

    def _later(self, number: int) -> set[int]:
        return {line.seq for raw in self._lines[number:] if (line := read_line(raw)) is not None}

    def _content(self, at: int, line: Line) -> AuditFinding | None:
        """Record a line that is in its right place."""
        checked = self._checked
        checked.head = Head(line.seq, line.hash)
        checked.records += 1
        checked.wanted.discard(line.hash)
        if line.kind not in _TELLING:
            return None
        record: dict[str, Any] = msgspec.json.decode(self._lines[at])
        if line.kind == "gap":
            checked.lost += int(record.get("lost", 0))
        if line.kind == "rotate":
            checked.oldest = record.get("oldest")
            if checked.records == 1:
                checked.before = number_before(record.get("before"))
        if line.kind == "recovered" and not self._accounted(at, record):
            return AuditFinding("removed", at + 1, "the pieces that this record speaks of are gone")
        missing = record.get("missing")
        if missing:
            why = f"the log ended at record {missing.get('seq')} and was cut before this start"
            return AuditFinding("truncated", at + 1, why)
        return None

    def _accounted(self, at: int, record: dict[str, Any]) -> bool:
        torn = record.get("torn") or []
        return torn == torn_account(self._lines[max(0, at - len(torn)) : at])


_TELLING = frozenset({"gap", "rotate", "recovered", "start"})


def broken_at_end(checked: Checked) -> AuditFinding | None:
    """Return the fault after all files were read: required hashes that weren't found."""
    if checked.finding is None and checked.wanted:
        last = checked.head.seq if checked.head is not None else 0
        why = f"ends at record {last}, before the head that it is known to have had"
        return AuditFinding("truncated", 0, why)
    return None


def lines_of(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, without unreadable ones."""
    for raw in data.split(b"\n"):
        if read_line(raw) is not None:
            yield msgspec.json.decode(raw)
