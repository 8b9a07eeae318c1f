"""Prometheus series of a scheduler, on SGLang's own ``/metrics``.

SGLang collects what all its processes write below ``PROMETHEUS_MULTIPROC_DIR``; series that a
scheduler defines appear by themselves. Labels take values of the contract's vocabularies only.
"""

from __future__ import annotations

from typing import Any, Protocol

from leyline_engine.contract import ForgetCounts, Receipt

_SPLICE_BUCKETS_S = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
_TOKEN_KINDS = ("prefix", "spliced", "prefilled", "freed")


class Metrics(Protocol):
    """What a scheduler counts."""

    def request(self, receipt: Receipt) -> None:
        """A request that carried an envelope; once, when its final receipt is known."""

    def forgot(self, before: ForgetCounts, now: ForgetCounts) -> None:
        """How far a forget has come since ``before``; all zeros before the first time."""

    def retained(self, turns: int) -> None:
        """How many turns are retained as sources now."""

    def receipt_dropped(self) -> None:
        """A message to the HTTP process was dropped."""


class NoMetrics:
    """Of servers without ``--enable-metrics`` and of ranks that repeat another's numbers."""

    def request(self, receipt: Receipt) -> None:
        """Nothing is counted."""

    def forgot(self, before: ForgetCounts, now: ForgetCounts) -> None:
        """Nothing is counted."""

    def retained(self, turns: int) -> None:
        """Nothing is counted."""

    def receipt_dropped(self) -> None:
        """Nothing is counted."""


class SchedulerMetrics:
    """The series of one scheduler process."""

    def __init__(self, registry: Any = None) -> None:
        """
        Args:
            registry: a ``CollectorRegistry``; by default the process's own.
        """
        # Chooses its storage when it is imported: only after SGLang has set the directory.
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram

        where = REGISTRY if registry is None else registry
        self._requests = Counter(
            "leyline_engine_requests_total",
            "Requests with an envelope, by what became of their edits and why.",
            ["outcome", "reason"],
            registry=where,
        )
        self._tokens = Counter(
            "leyline_engine_tokens_total",
            "Prompt tokens of requests with an envelope, by where their KV came from; "
            "freed: slots that edits gave back.",
            ["kind"],
            registry=where,
        )
        self._splice_seconds = Histogram(
            "leyline_engine_splice_seconds",
            "Time that planning, copying and rotating took, of requests that were spliced.",
            buckets=_SPLICE_BUCKETS_S,
            registry=where,
        )
        self._forgotten = Counter(
            "leyline_engine_forgotten_slots_total",
            "Slots that forgets reached. pending: still held by a running request when the forget "
            "was demanded; counted as overwritten too, once they are.",
            ["state"],
            registry=where,
        )
        self._retained = Gauge(
            "leyline_engine_retained_turns",
            "Turns retained as sources for later edits.",
            multiprocess_mode="livesum",
            registry=where,
        )
        self._dropped = Counter(
            "leyline_engine_receipts_dropped_total",
            "Messages to the HTTP process that were dropped because it didn't take them.",
            registry=where,
        )

    def request(self, receipt: Receipt) -> None:
        """See :class:`Metrics`."""
        reason = receipt.reason.value if receipt.reason is not None else "none"
        self._requests.labels(receipt.outcome.value, reason).inc()
        for kind in _TOKEN_KINDS:
            self._tokens.labels(kind).inc(getattr(receipt.tokens, kind))
        if receipt.tokens.spliced:
            self._splice_seconds.observe(receipt.splice_us / 1e6)

    def forgot(self, before: ForgetCounts, now: ForgetCounts) -> None:
        """See :class:`Metrics`."""
        for state in ("overwritten", "shared_retained", "pending"):
            # "pending" shrinks when slots are overwritten; a counter only grows.
            grown = max(0, getattr(now, state) - getattr(before, state))
            self._forgotten.labels(state).inc(grown)

    def retained(self, turns: int) -> None:
        """See :class:`Metrics`."""
        self._retained.set(turns)

    def receipt_dropped(self) -> None:
        """See :class:`Metrics`."""
        self._dropped.inc()


def open_metrics(*, enabled: bool, attn_tp_rank: int) -> Metrics:
    """What a scheduler counts with.

    Args:
        enabled: the server's ``--enable-metrics``.
        attn_tp_rank: only rank 0 counts; the others do the same work again.
    """
    return SchedulerMetrics() if enabled and attn_tp_rank == 0 else NoMetrics()
