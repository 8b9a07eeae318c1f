"""Forgets that wait for running requests to give back their slots."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import msgspec

from leyline_engine.contract import ForgetCounts


class PendingForgets:
    """Counts by ticket, from the forget until the last slot that it waits for is overwritten."""

    def __init__(self) -> None:
        self._counts: dict[str, ForgetCounts] = {}
        self._changed: set[str] = set()
        self._waiting: dict[Hashable, dict[str, int]] = {}
        self._released: list[tuple[str, int]] = []
        self._owners: dict[str, Hashable] = {}

    def open(
        self, ticket: str, overwritten: int, shared: int, owner: Hashable = None
    ) -> ForgetCounts:
        """Open a ticket, and count the slots that wait for it already.

        Args:
            owner: the session whose spans are forgotten.
        """
        self._owners[ticket] = owner
        pending = sum(waits.get(ticket, 0) for waits in self._waiting.values())
        pending += sum(count for name, count in self._released if name == ticket)
        self._counts[ticket] = ForgetCounts(overwritten, shared, pending)
        return self._counts[ticket]

    def wait(self, ticket: str, holder: Hashable, count: int) -> None:
        """Note that ``ticket`` wants ``count`` slots of ``holder`` overwritten; once per holder."""
        waits = self._waiting.setdefault(holder, {})
        more = count - waits.get(ticket, 0)
        waits[ticket] = count
        self._add(ticket, pending=more)

    def counts(self, ticket: str) -> ForgetCounts | None:
        """Return a ticket's present counts; None if it was never opened, or has ended."""
        return self._counts.get(ticket)

    def tickets(self, holder: Hashable) -> tuple[str, ...]:
        """Return the tickets that wait for a holder."""
        return tuple(self._waiting.get(holder, ()))

    def let_go(self, holders: Iterable[Hashable]) -> None:
        """Note that holders gave back slots; the next :meth:`settle` counts them."""
        for holder in holders:
            self._released.extend(self._waiting.pop(holder, {}).items())

    def of(self, owner: Hashable) -> int:
        """Return the number of slots that wait, of all tickets of a session."""
        tickets = (ticket for ticket, whose in self._owners.items() if whose == owner)
        return sum(self._counts[ticket].pending for ticket in tickets if ticket in self._counts)

    def settle(self) -> None:
        """Count all slots that were given back as overwritten."""
        for ticket, count in self._released:
            self._add(ticket, overwritten=count, pending=-count)
        self._released.clear()

    def _add(self, ticket: str, *, overwritten: int = 0, pending: int) -> None:
        counts = self._counts.get(ticket)
        if counts is not None:
            self._changed.add(ticket)
            self._counts[ticket] = msgspec.structs.replace(
                counts,
                overwritten=counts.overwritten + overwritten,
                pending=counts.pending + pending,
            )

    def take(self) -> dict[str, ForgetCounts]:
        """Return the tickets that changed since the last call; ends those with none pending."""
        changed = {ticket: self._counts[ticket] for ticket in self._changed}
        self._changed.clear()
        self._counts = {t: counts for t, counts in self._counts.items() if counts.pending}
        self._owners = {t: owner for t, owner in self._owners.items() if t in self._counts}
        return changed
