"""Prometheus metrics, one registry per application."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from leyline_engine.contract import TokenCounts

_LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_STAGE_BUCKETS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_TURN_BUCKETS = ((1, "1"), (4, "2-4"), (9, "5-9"), (19, "10-19"), (39, "20-39"))
_LAST_TURN_BUCKET = "40+"


def turn_bucket(index: int) -> str:
    """The label of turn ``index`` (0-based): few values, so that boards stay cheap."""
    number = index + 1
    return next((label for last, label in _TURN_BUCKETS if number <= last), _LAST_TURN_BUCKET)


class Metrics:
    """Every metric of the proxy. Labels hold configured or engine-given names only."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._define_requests()
        self._define_admission()
        self._define_turns()
        self._define_state()
        self._define_claims()

    def _define_requests(self) -> None:
        self.requests = Counter(
            "leyline_requests",
            "Requests by HTTP status, or 'disconnected'.",
            ("tenant", "model", "route", "status"),
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "leyline_request_seconds",
            "Time from a request's arrival to the end of its response.",
            ("tenant", "model", "route"),
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )
        self.ttft_seconds = Histogram(
            "leyline_ttft_seconds",
            "Time from a chat request's arrival to its first token; whole answers when not "
            "streamed.",
            ("tenant", "model", "outcome"),
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )
        self.stage_seconds = Histogram(
            "leyline_stage_seconds",
            "Time that the proxy itself spends on a chat turn, by stage.",
            ("stage",),
            buckets=_STAGE_BUCKETS,
            registry=self.registry,
        )

    def _define_admission(self) -> None:
        self.queue_waiting = Gauge(
            "leyline_queue_waiting",
            "Requests that wait for a place.",
            ("tenant",),
            registry=self.registry,
        )
        self.queue_running = Gauge(
            "leyline_queue_running",
            "Requests that have a place: those under way.",
            ("tenant",),
            registry=self.registry,
        )
        self.queue_seconds = Histogram(
            "leyline_queue_seconds",
            "Time that requests waited for a place before they were forwarded.",
            ("tenant",),
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )
        self.limited = Counter(
            "leyline_limited_requests",
            "Requests that were refused because of a limit of their tenant, by its name.",
            ("tenant", "limit"),
            registry=self.registry,
        )
        self.key_reloads = Counter(
            "leyline_key_reloads",
            "Changes of the key file, by whether it was loaded or refused.",
            ("result",),
            registry=self.registry,
        )

    def _define_turns(self) -> None:
        self.turns = Counter(
            "leyline_turns",
            "Chat turns by what became of their edits.",
            ("tenant", "model", "outcome", "reason"),
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "leyline_prompt_tokens",
            "Prompt tokens by where their KV came from.",
            ("tenant", "model", "source", "turn"),
            registry=self.registry,
        )
        self.freed_tokens = Counter(
            "leyline_freed_tokens",
            "KV slots given back to the pool by edits.",
            ("tenant", "model"),
            registry=self.registry,
        )
        self.edits = Counter(
            "leyline_edits",
            "Edits by cause, mode and the reason in the receipt.",
            ("tenant", "cause", "mode", "outcome"),
            registry=self.registry,
        )
        self.policy_messages = Counter(
            "leyline_policy_messages",
            "Messages that went out edited or were left out, on each turn, by policy.",
            ("policy", "mode"),
            registry=self.registry,
        )
        self.policy_faults = Counter(
            "leyline_policy_faults",
            "Policies that were skipped for one turn.",
            ("policy", "fault"),
            registry=self.registry,
        )
        self.policy_reloads = Counter(
            "leyline_policy_reloads",
            "Changes of the policy file, by whether it was loaded or refused.",
            ("result",),
            registry=self.registry,
        )
        self.policy_completions = Counter(
            "leyline_policy_completions",
            "Texts that policies had a model write, by whether it did.",
            ("result",),
            registry=self.registry,
        )
        self.policy_notes = Counter(
            "leyline_policy_notes",
            "What policies reported without editing: warnings, dry runs.",
            ("policy", "kind"),
            registry=self.registry,
        )
        self.receipts_missing = Counter(
            "leyline_receipts_missing",
            "Turns whose engine gave no receipt.",
            ("model",),
            registry=self.registry,
        )

    def _define_state(self) -> None:
        self.sessions = Gauge("leyline_sessions", "Sessions in the store.", registry=self.registry)
        self.session_store_up = Gauge(
            "leyline_session_store_up",
            "1 when sessions can be read and written, 0 when their store is out of reach.",
            registry=self.registry,
        )
        self.engine_splices = Gauge(
            "leyline_engine_splices",
            "1 when turns of this model are spliced, 0 when they can't be.",
            ("upstream", "model", "engine"),
            registry=self.registry,
        )
        self.upstream_up = Gauge(
            "leyline_upstream_up",
            "1 when the engine answers.",
            ("upstream",),
            registry=self.registry,
        )
        self.upstream_circuit = Gauge(
            "leyline_upstream_circuit_open",
            "1 while an engine that fails requests is given none, or one as a trial.",
            ("upstream",),
            registry=self.registry,
        )
        self.upstream_running = Gauge(
            "leyline_upstream_running",
            "Requests under way at an engine.",
            ("upstream",),
            registry=self.registry,
        )
        self.failovers = Counter(
            "leyline_failovers",
            "Requests that went on to another engine before their first byte, by the engine that "
            "failed them.",
            ("upstream",),
            registry=self.registry,
        )
        self.erasures = Counter(
            "leyline_erasures",
            "Forgets that were carried to engines which held a session before, by what came of it.",
            ("result",),
            registry=self.registry,
        )
        self.build_info = Gauge(
            "leyline_build_info", "Always 1.", ("version",), registry=self.registry
        )

    def _define_claims(self) -> None:
        """Those by claim have a caller's id in a label; ``telemetry/claims.py`` bounds them."""
        self.claim_state = Gauge(
            "leyline_claim_state",
            "1 for the state that a live claim is in.",
            ("tenant", "claim", "kind", "state"),
            registry=self.registry,
        )
        of_claim = ("tenant", "claim")
        self.claim_resident_tokens = Gauge(
            "leyline_claim_resident_tokens",
            "Tokens of a live claim that are in the KV cache.",
            of_claim,
            registry=self.registry,
        )
        self.claim_hits = Gauge(
            "leyline_claim_hits",
            "Requests so far that matched all that a live claim holds.",
            of_claim,
            registry=self.registry,
        )
        self.claim_age_seconds = Gauge(
            "leyline_claim_age_seconds",
            "Time since a live claim was accepted.",
            of_claim,
            registry=self.registry,
        )
        self.claim_pressure = Gauge(
            "leyline_claim_pressure",
            "Requests so far that were refused with a live claim in their way, and evictions that "
            "passed it over.",
            of_claim,
            registry=self.registry,
        )
        self._define_all_claims()

    def _define_all_claims(self) -> None:
        by_kind = ("tenant", "kind")
        self.claims = Gauge("leyline_claims", "Live claims.", by_kind, registry=self.registry)
        self.claims_required_tokens = Gauge(
            "leyline_claims_required_tokens",
            "Tokens that live claims require to be resident.",
            by_kind,
            registry=self.registry,
        )
        self.claims_resident_tokens = Gauge(
            "leyline_claims_resident_tokens",
            "Tokens of live claims that are in the KV cache; shared ones count for each.",
            by_kind,
            registry=self.registry,
        )
        self.claim_events = Counter(
            "leyline_claim_events",
            "Events of the engine's claims, by their kind.",
            ("event",),
            registry=self.registry,
        )
        self.claim_events_missed = Counter(
            "leyline_claim_events_missed",
            "Events that the engine had dropped before they were fetched.",
            registry=self.registry,
        )
        self.claim_refusals = Counter(
            "leyline_claim_refusals",
            "Requests that were refused because they didn't fit beside hard claims.",
            ("tenant",),
            registry=self.registry,
        )
        self.audit_failures = Counter(
            "leyline_audit_failures",
            "Records that could not be written to the audit log.",
            registry=self.registry,
        )
        self.audit_stream_failures = Counter(
            "leyline_audit_stream_failures",
            "Records of the audit log that could not be added to its Redis stream.",
            registry=self.registry,
        )

    def watch_replica(
        self, name: str, *, running: Callable[[], int], circuit_open: Callable[[], bool]
    ) -> None:
        """Read the gauges of an engine when they are asked for."""
        self.upstream_running.labels(name).set_function(running)
        self.upstream_circuit.labels(name).set_function(circuit_open)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure one stage of a chat turn."""
        started = perf_counter()
        try:
            yield
        finally:
            self.stage_seconds.labels(stage=name).observe(perf_counter() - started)

    def count_tokens(self, tenant: str, model: str, tokens: TokenCounts, turn: int) -> None:
        """Add one turn's prompt tokens and freed slots."""
        bucket = turn_bucket(turn)
        for source, count in (
            ("cached", tokens.prefix),
            ("spliced", tokens.spliced),
            ("prefilled", tokens.prefilled),
        ):
            self.prompt_tokens.labels(tenant, model, source, bucket).inc(count)
        if tokens.freed:
            self.freed_tokens.labels(tenant, model).inc(tokens.freed)
