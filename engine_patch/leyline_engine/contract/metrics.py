"""Metrics as data: what each series is called, counts and is labelled with, for code and docs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MetricKind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric of the catalogue.

    Attributes:
        name: as exposed, without the suffixes that the kind adds (``_total``, ``_bucket`` …).
        help: one sentence or two: what is counted, in which unit.
        labels: names of labels. Their values are configured, engine-given or of a closed
            vocabulary, never a caller's text.
        buckets: upper bounds of a histogram, in its unit.
        bad: what a bad value looks like and means, in a sentence; empty where there is none.
    """

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    bad: str = ""


POOL_OWNERS = ("exact", "spliced", "claimed", "in_flight", "free")
"""Who a slot of the KV pool belongs to; each to one of them, claims before the tree."""

ENGINE_METRICS: tuple[MetricSpec, ...] = (
    MetricSpec(
        "leyline_engine_requests",
        "counter",
        "Requests with an envelope, by what became of their edits and why.",
        ("outcome", "reason"),
        bad="A rising share of reprefilled: edits are sent and not spliced; the reason says why.",
    ),
    MetricSpec(
        "leyline_engine_tokens",
        "counter",
        "Prompt tokens of requests with an envelope, by where their KV came from; "
        "freed: slots that edits gave back.",
        ("kind",),
        bad="prefilled grows as fast as prefix and spliced together: little is reused.",
    ),
    MetricSpec(
        "leyline_engine_splice_seconds",
        "histogram",
        "Time that planning, copying and rotating took, of requests that were spliced.",
        buckets=(1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
        bad="Near the time that a prefill of the same tokens takes: splicing doesn't pay.",
    ),
    MetricSpec(
        "leyline_engine_splice_bytes",
        "counter",
        "Bytes of KV that splices copied, over all layers, keys rotated on the way.",
    ),
    MetricSpec(
        "leyline_engine_pool_tokens",
        "gauge",
        "Slots of the KV pool, by owner; they sum to the capacity. exact, spliced: cached in the "
        "tree, before and behind the first splice of their path. claimed: cached and held by live "
        "claims, whichever of the two. in_flight: a running request's own, or waiting to be "
        "overwritten.",
        ("owner",),
        bad="free and exact near 0 while claimed is large: claims leave requests too little.",
    ),
    MetricSpec(
        "leyline_engine_pool_capacity_tokens",
        "gauge",
        "Slots of the KV pool, one token each.",
    ),
    MetricSpec(
        "leyline_engine_pool_peak_tokens",
        "gauge",
        "The most slots of the KV pool that were not free at once since the engine started.",
        bad="Equal to the capacity: the pool was full, and something was evicted or had to wait.",
    ),
    MetricSpec(
        "leyline_engine_evicted_tokens",
        "counter",
        "Slots of cached KV that were freed to make room.",
        bad="A rate near that of prefilled tokens: what is cached goes before it is used again.",
    ),
    MetricSpec(
        "leyline_engine_forgotten_slots",
        "counter",
        "Slots that forgets reached. pending: still held by a running request when the forget "
        "was demanded; counted as overwritten too, once they are.",
        ("state",),
        bad="pending grows and overwritten doesn't follow: a running request keeps what is to go.",
    ),
    MetricSpec(
        "leyline_engine_refusals",
        "counter",
        "Requests that were refused, or ended early, because they did not fit beside hard claims.",
        bad="Above 0: hard claims crowd out requests; fewer of them, or a larger pool.",
    ),
    MetricSpec(
        "leyline_engine_retained_turns",
        "gauge",
        "Turns retained as sources for later edits.",
    ),
    MetricSpec(
        "leyline_engine_retained_tokens",
        "gauge",
        "Tokens of the turns retained as sources, cached or not.",
    ),
    MetricSpec(
        "leyline_engine_ledger_spans",
        "gauge",
        "Names of message spans in the ledger of what may be forgotten.",
    ),
    MetricSpec(
        "leyline_engine_lineages",
        "gauge",
        "Lineages in that ledger: spliced KV of which it is known what it has read.",
    ),
    MetricSpec(
        "leyline_engine_receipts_dropped",
        "counter",
        "Messages to the HTTP process that were dropped because it didn't take them.",
        bad="Above 0: receipts are missing, and those turns can't be spliced from.",
    ),
    MetricSpec(
        "leyline_engine_energy_joules",
        "counter",
        "Energy that the engine's GPUs used, as NVML reads it; 0 where there is no such reading.",
    ),
    MetricSpec(
        "leyline_engine_request_energy_joules",
        "histogram",
        "Estimate, by request: its share of that energy by the tokens that were computed "
        "while it ran.",
        buckets=(0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10_000.0),
    ),
)
"""What each engine tells of itself on its own ``/metrics``."""
