"""Metrics as data: names, meanings and labels of all series, for the code and the docs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MetricKind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric of the catalogue.

    Attributes:
        name: as exposed, without the suffixes that the kind adds (``_total``, ``_bucket`` …).
        help: one or two sentences on what is counted, and its unit.
        labels: names of labels. Their values are configured, engine-given or of a closed
            vocabulary, never a caller's text.
        buckets: upper bounds of a histogram, in its unit.
        bad: describes a bad value and its meaning in a sentence; empty if there is none.
    """

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    bad: str = ""


POOL_OWNERS = ("exact", "spliced", "claimed", "in_flight", "free")
"""Owners of the slots of the KV pool. Each slot has one; claims come before the tree."""

ENGINE_METRICS: tuple[MetricSpec, ...] = (
    MetricSpec(
        "leyline_engine_requests",
        "counter",
        "Requests with an envelope, by the outcome of their edits and its reason.",
        ("outcome", "reason"),
        bad="A rising share of reprefilled: edits are sent but not spliced; the reason says why.",
    ),
    MetricSpec(
        "leyline_engine_tokens",
        "counter",
        "Prompt tokens of requests with an envelope, by the source of their KV; "
        "freed: slots that edits gave back.",
        ("kind",),
        bad="prefilled grows as fast as prefix, spliced and reused together: much is new.",
    ),
    MetricSpec(
        "leyline_engine_splice_seconds",
        "histogram",
        "Time for planning, copying and rotating, of requests that were spliced.",
        buckets=(1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
        bad="Near the time that a prefill of the same tokens takes: splicing doesn't pay off.",
    ),
    MetricSpec(
        "leyline_engine_splice_bytes",
        "counter",
        "Bytes of KV that splices copied, over all layers, including the rotation of keys.",
    ),
    MetricSpec(
        "leyline_engine_pool_tokens",
        "gauge",
        "Slots of the KV pool, by owner; they sum to the capacity. exact, spliced: cached in the "
        "tree, before and after the first splice of their path. claimed: cached and held by live "
        "claims, either of the two. in_flight: a running request's own, or waiting to be "
        "overwritten.",
        ("owner",),
        bad="free and exact near 0 while claimed is large: claims leave too little for requests.",
    ),
    MetricSpec(
        "leyline_engine_state_slots",
        "gauge",
        "Slots of recurrent states, used or free; 0 on models without recurrent layers.",
        ("owner",),
        bad="free is 0: the oldest states make room, and edits of old messages prefill more.",
    ),
    MetricSpec(
        "leyline_engine_pool_capacity_tokens",
        "gauge",
        "Slots of the KV pool, one token each.",
    ),
    MetricSpec(
        "leyline_engine_pool_peak_tokens",
        "gauge",
        "The most slots of the KV pool that were occupied at once since the engine started.",
        bad="Equal to the capacity: the pool was full, and something was evicted or had to wait.",
    ),
    MetricSpec(
        "leyline_engine_evicted_tokens",
        "counter",
        "Slots of cached KV that were freed to make room.",
        bad="A rate near that of prefilled tokens: cached KV is evicted before it is used again.",
    ),
    MetricSpec(
        "leyline_engine_retired_tokens",
        "counter",
        "Slots of cached KV that were freed at once, as their session was compacted: no turn would "
        "have continued it.",
        bad="Nothing while agents compact their sessions: the slots wait for their eviction.",
    ),
    MetricSpec(
        "leyline_engine_forgotten_slots",
        "counter",
        "Slots that forgets reached. pending: still held by a running request when the forget "
        "was demanded; these also count as overwritten, as soon as they are.",
        ("state",),
        bad="pending grows and overwritten doesn't follow: a running request keeps these slots.",
    ),
    MetricSpec(
        "leyline_engine_refusals",
        "counter",
        "Requests that were refused, or ended early, because they did not fit beside hard claims.",
        bad="Above 0: hard claims crowd out requests. Use fewer hard claims, or a larger pool.",
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
        "Names of message spans in the ledger, which tracks KV that may be forgotten.",
    ),
    MetricSpec(
        "leyline_engine_lineages",
        "gauge",
        "Lineages in that ledger: spliced KV for which the ledger knows the text it has read.",
    ),
    MetricSpec(
        "leyline_engine_receipts_dropped",
        "counter",
        "Messages to the HTTP process that were dropped because it didn't take them.",
        bad="Above 0: receipts are missing, and later edits can't splice from those turns.",
    ),
    MetricSpec(
        "leyline_engine_energy_joules",
        "counter",
        "Energy that the engine's GPUs used, from NVML; 0 if NVML has no reading.",
    ),
    MetricSpec(
        "leyline_engine_request_energy_joules",
        "histogram",
        "Estimate for each request: its share of that energy, by the tokens that were "
        "computed while it ran.",
        buckets=(0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10_000.0),
    ),
)
"""Metrics that each engine exposes on its own ``/metrics``."""
