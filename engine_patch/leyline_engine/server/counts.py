"""An engine's counts on their way to the HTTP process, whose ``/metrics`` shows them.

For engines whose schedulers have no metrics of their own that the HTTP process collects. Counts add
up in the scheduler and are sent at most once a second, so that no step waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from leyline_engine.contract import ForgetCounts, Receipt
from leyline_engine.metrics import EngineMetrics
from leyline_engine.occupancy import PoolLevels, RegistryLevels

EVERY_S = 1.0


class Counts(msgspec.Struct, frozen=True, tag="counts"):
    """The counts since the last message."""

    requests: tuple[Receipt, ...] = ()
    """Final receipts."""
    forgets: tuple[tuple[ForgetCounts, ForgetCounts], ...] = ()
    """Progress of forgets: before, and now."""
    refused: int = 0
    copied: int = 0
    """Bytes."""
    evicted: int = 0
    """Tokens, as of ``retired``."""
    retired: int = 0
    registries: RegistryLevels | None = None

    def apply(self, metrics: EngineMetrics) -> None:
        """Count all this again."""
        for receipt in self.requests:
            metrics.request(receipt)
        for before, now in self.forgets:
            metrics.forgot(before, now)
        for _ in range(self.refused):
            metrics.refused()
        metrics.copied(self.copied)
        metrics.evicted(self.evicted)
        metrics.retired(self.retired)
        if self.registries is not None:
            metrics.registries(self.registries)


class SentMetrics:
    """Counts of a scheduler, as :class:`~leyline_engine.metrics.EngineMetrics`.

    Args:
        send: sends a message to the HTTP process; returns at once.
        now_s: a clock that never goes back.
    """

    def __init__(
        self, send: Callable[[Counts], None], *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._send = send
        self._now_s = now_s
        self._due_s = 0.0
        self._counts = Counts()

    @property
    def collects(self) -> bool:
        """Always True."""
        return True

    def request(self, receipt: Receipt) -> None:
        """Count a request that ended."""
        self._set(requests=(*self._counts.requests, receipt))

    def forgot(self, before: ForgetCounts, now: ForgetCounts) -> None:
        """Count a forget's progress."""
        self._set(forgets=(*self._counts.forgets, (before, now)))

    def refused(self) -> None:
        """Count a refused request."""
        self._set(refused=self._counts.refused + 1)

    def copied(self, size: int) -> None:
        """Count copied bytes."""
        self._set(copied=self._counts.copied + size)

    def evicted(self, tokens: int) -> None:
        """Count evicted tokens."""
        self._set(evicted=self._counts.evicted + tokens)

    def retired(self, tokens: int) -> None:
        """Count freed tokens."""
        self._set(retired=self._counts.retired + tokens)

    def receipt_dropped(self) -> None:
        """Do nothing: this message would be dropped, too."""

    def pool(self, levels: PoolLevels) -> None:
        """Do nothing: an engine that sends its counts doesn't know its slots by owner."""

    def registries(self, levels: RegistryLevels) -> None:
        """Note the sizes of the records of turns."""
        self._set(registries=levels)

    def energy(self, joules: float) -> None:
        """Do nothing: see :meth:`pool`."""

    def request_energy(self, joules: float) -> None:
        """Do nothing: see :meth:`pool`."""

    def _set(self, **changed: object) -> None:
        self._counts = msgspec.structs.replace(self._counts, **changed)

    @property
    def is_due(self) -> bool:
        """True if a second has passed since the last message."""
        return self._now_s() >= self._due_s

    def flush(self) -> None:
        """Send what was counted, if there is any."""
        self._due_s = self._now_s() + EVERY_S
        if self._counts != Counts():
            counts, self._counts = self._counts, Counts()
            self._send(counts)
