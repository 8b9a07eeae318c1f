"""The replay engine: admission, forwards and accounting over one model. Single-threaded."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Series
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import lcm
from secrets import token_hex

import torch
from transformers import __version__ as transformers_version

from leyline_engine.admit.edits import forgets
from leyline_engine.admit.plan import Prefill
from leyline_engine.contract import (
    ATTENTION_SINK,
    Capability,
    EditPayload,
    ForgetCounts,
    KVFacts,
    LedgerAnswer,
    LedgerQuestion,
    Proof,
    Recompute,
    RecurrentEdits,
    StateFacts,
    engine_actions,
    this_plugin,
)
from leyline_engine.energy import EnergyAccount
from leyline_engine.metrics import EngineMetrics, NoMetrics
from leyline_engine.occupancy import PoolLevels, RegistryLevels, held_by_claims
from leyline_engine.proof.prover import Prover
from leyline_engine.records.ledger import SpanLedger, Struck
from leyline_engine.records.ledger_reading import read_ledger
from leyline_engine.records.lineage import fold_keys
from leyline_engine.records.sources import SourceRegistry, SourceTurn
from leyline_engine.reuse.fingerprints import MatcherKind
from leyline_replay.admission import Admission, Admitter
from leyline_replay.cache.anchors import Anchoring, AnchorStore
from leyline_replay.cache.manager import CacheManager
from leyline_replay.cache.pool import KVLayout, KVPool
from leyline_replay.cache.slots import PoolExhaustedError, PoolStats
from leyline_replay.cache.working import WorkingCache
from leyline_replay.engine_claims import (
    EngineClaims,
    OpenClaims,
    RefusedByClaimError,
    candidate_of,
)
from leyline_replay.margin_gate import MarginGate, load
from leyline_replay.models.loader import LoadedModel
from leyline_replay.models.rotary_probe import ModelFacts, read_model_facts
from leyline_replay.proving import ReplaySite
from leyline_replay.receipts import receipt_of
from leyline_replay.requests import GenerationRequest
from leyline_replay.retiring import retire
from leyline_replay.sequence import Forward, Sequence

__all__ = [
    "GenerationRequest",
    "PoolExhaustedError",
    "PromptTooLongError",
    "RefusedByClaimError",
    "ReplayEngine",
]


class PromptTooLongError(ValueError):
    """Prompt and requested output can never fit; the caller's fault."""


class ReplayEngine:
    """An engine that serves one model from one KV pool. Not thread safe: one thread drives it."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        pool_tokens: int,
        page_tokens: int = 1,
        kv_dtype: torch.dtype | None = None,
        chunk_tokens: int = 512,
        anchoring: Anchoring = Anchoring(),  # noqa: B008 - immutable
        splicing: bool = True,
        matcher: MatcherKind = MatcherKind.WINNOW,
        recompute: Recompute = Recompute(),  # noqa: B008 - immutable
        secret: str | None = None,
        open_claims: OpenClaims = EngineClaims,
        metrics: EngineMetrics | None = None,
        energy: EnergyAccount | None = None,
    ) -> None:
        self.metrics = metrics or NoMetrics()
        self._energy = energy
        facts = read_model_facts(model.model)
        self._model = model.model
        self._chunk_tokens = chunk_tokens
        self._layout, self._device = replace(facts.layout, packed=kv_dtype), model.model.device
        self._forms, self._layers = facts.forms, facts.layers
        self.cache = self._open_cache(facts, pool_tokens, page_tokens, anchoring, secret)
        self.max_context = int(
            min(getattr(model.model.config, "max_position_embeddings", pool_tokens), pool_tokens)
        )
        # The engine counts with the whole requested output: it fits, or is refused.
        self.claims = open_claims(self.cache, self.max_context)
        self._running: set[Sequence] = set()
        self.proofs = self.cache.witness = Prover(ReplaySite(self.cache, self._running))
        unsupported = facts.unsupported or ("" if splicing else "switched off by configuration")
        self._admitter = Admitter(
            self.cache,
            splices=not unsupported,
            struck=self._withhold_readers,
            matcher=matcher,
            recompute=recompute,
        )
        self.capability = self._capability(model, facts, unsupported)

    def _open_cache(
        self,
        facts: ModelFacts,
        pool_tokens: int,
        page_tokens: int,
        anchoring: Anchoring,
        secret: str | None,
    ) -> CacheManager:
        pool = KVPool(self._layout, pool_tokens, facts.rotary, self._device)
        states = facts.state_pool(anchoring.slots, self._device)
        if states is None or page_tokens > 1:
            # Exact ends need no grid where there is no state, and a tree has whole pages only.
            grid = 1 if states is None else lcm(anchoring.grid, page_tokens)
            anchoring = replace(anchoring, grid=grid)
        return CacheManager(
            pool,
            pool_tokens,
            SourceRegistry(secret=secret),
            SpanLedger(),
            self.metrics,
            page_tokens=page_tokens,
            anchors=partial(
                AnchorStore,
                states=states,
                anchoring=anchoring,
                window=self._layout.window,
                alive=pool.alive,
            ),
        )

    def _capability(self, model: LoadedModel, facts: ModelFacts, unsupported: str) -> Capability:
        recurrent = self.cache.anchors.states is not None
        return Capability(
            engine="replay",
            engine_version=f"transformers {transformers_version}",
            model=model.name,
            model_fingerprint=model.fingerprint,
            architecture=type(model.model).__name__,
            vocab_size=int(model.model.config.vocab_size),
            max_context=self.max_context,
            splices=not unsupported,
            reuse_within=not unsupported and not recurrent,
            unsupported_reason=unsupported,
            actions=engine_actions(splices=not unsupported, recurrent=recurrent),
            rotary=facts.facts,
            state=None if unsupported else _state_facts(self.cache.anchors),
            kv=_kv_facts(self._layout, self.cache.capacity, self.cache.page_tokens),
            sink=ATTENTION_SINK,
            instance=token_hex(8),
            plugin=this_plugin(),
        )

    def admit(self, request: GenerationRequest) -> Sequence:
        """Find and splice what is cached, and take the slots that the rest of the prompt needs.

        Raises:
            PoolExhaustedError: no room beside the running requests; try again later.
            PromptTooLongError: it can never fit.
            RefusedByClaimError: it can't fit before a claim ends.
        """
        started = time.perf_counter_ns()
        request = self.examine(request)
        payload = request.payload
        if payload is not None and forgets(payload):
            self._forgets_for(request, payload)
        admits = self._admits(request)
        self.claims.arrived(candidate_of(request), admits=admits)
        admission = self._admitter.admit(
            request.request_id,
            request.tokens,
            payload,
            request.forgot,
            request.reuse if admits else None,
        )
        try:
            sequence = self._start(request, admission, started, admits=admits)
        except BaseException:
            self._admitter.give_back(admission)
            raise
        self._running.add(sequence)
        self._count_hits(sequence)
        return sequence

    def examine(self, request: GenerationRequest) -> GenerationRequest:
        """Check that claims leave a request room. It may wait then, and be checked again.

        Returns:
            The request, with the counts of what was forgotten for it.

        Raises:
            PromptTooLongError: it can never fit.
            RefusedByClaimError: it can't fit before a claim ends.
        """
        length = len(request.tokens)
        if length == 0 or length + request.max_new_tokens > self.max_context:
            raise PromptTooLongError(
                f"the prompt has {length} tokens and {request.max_new_tokens} more are asked for; "
                f"the context holds {self.max_context}"
            )
        keeper, candidate, payload = self.claims.keeper, candidate_of(request), request.payload

        def cached() -> list[int]:
            slots: list[int] = self._admitter.cached(request.tokens, payload).tolist()
            return slots

        if payload is not None and forgets(payload) and keeper.blocks(candidate, cached):
            # The request may forget what is in its way, and no claim keeps that.
            request = self._forget_first(request, payload)
        refusal = keeper.refuse(candidate, cached)
        if refusal is not None:
            raise RefusedByClaimError(refusal, forgot=request.forgot)
        return request

    def _forget_first(self, request: GenerationRequest, payload: EditPayload) -> GenerationRequest:
        self._forgets_for(request, payload)
        forgot = self._admitter.forget(request.request_id, request.tokens, payload, request.forgot)
        return replace(request, forgot=forgot)

    def outgrown(
        self, request: GenerationRequest, sequence: Sequence
    ) -> RefusedByClaimError | None:
        """Return why a request found no slot to continue; None if no claim holds any."""
        done = len(sequence.fed)
        candidate = replace(
            candidate_of(request),
            prompt_tokens=len(request.tokens) + done,
            max_new_tokens=request.max_new_tokens - done,
        )
        refusal = self.claims.outgrown(candidate, sequence.held[: sequence.owned_from])
        return None if refusal is None else RefusedByClaimError(refusal, began=True)

    def _admits(self, request: GenerationRequest) -> bool:
        payload = request.payload
        barred = payload is not None and not self.claims.keeper.admits(
            payload.scope, payload.session
        )
        return request.admits and not barred

    def _count_hits(self, sequence: Sequence) -> None:
        session = sequence.session
        if session is not None:
            length = sequence.receipt.tokens.prefix
            prefix = sequence.prompt[:length]
            self.claims.matched_by(
                session, lambda: fold_keys(prefix, sequence.lineage, session[0]), length
            )

    def _retained(
        self, admission: Admission, turn: SourceTurn, retires: tuple[str, ...] = ()
    ) -> None:
        self._admitter.retained(turn)
        if admission.edited:
            self.claims.follow(turn, admission.sources, admission.edited)
        if retires:
            claimed = self.claims.keeper.places.values()
            self.metrics.retired(retire(self.cache, turn, retires, self._running, claimed))

    def _forgets_for(self, request: GenerationRequest, payload: EditPayload) -> None:
        """Withhold KV of the session's running requests, which may have read forgotten spans."""
        session = (payload.scope, payload.session)
        if request.prove is not None:
            self.proofs.expect(request.request_id, session, request.prove)
        for running in self._running:
            if running.session == session:
                running.withhold(request.request_id)

    def _withhold_readers(self, ticket: str, struck: Struck) -> None:
        """Withhold KV of other sessions' running requests that may use shared KV of its readers."""
        for running in self._running:
            if running.draws_on(struck):
                running.withhold(ticket)

    def settled_forgets(self) -> dict[str, ForgetCounts]:
        """Return forgets of which more was overwritten since the last call, by request id."""
        return self.cache.settled_forgets()

    def settled_proofs(self, forgets: Mapping[str, ForgetCounts]) -> dict[str, Proof]:
        """Return the proofs that changed since the last call, by request id.

        Args:
            forgets: what :meth:`settled_forgets` returned.
        """
        return self.proofs.settled(forgets)

    def read_ledger(self, question: LedgerQuestion) -> LedgerAnswer:
        """Return who holds or has read spans of a session."""
        pending = self.cache.pending_of((question.scope, question.session))
        return read_ledger(question, self.cache.ledger, self.cache.registry, pending)

    def _start(
        self, request: GenerationRequest, admission: Admission, started: int, *, admits: bool
    ) -> Sequence:
        plan, payload = admission.plan, request.payload
        retires = payload.retire if payload is not None else ()
        working = WorkingCache(
            self._layout,
            plan.length + request.max_new_tokens,
            self._device,
            forms=self._forms,
            layers=self._layers,
        )
        load(working, self.cache, admission)
        return Sequence(
            forward=self._forward if self._energy is None else self._metered(request, self._energy),
            cache=self.cache,
            working=working,
            prompt=request.tokens,
            lineage=admission.lineage,
            receipt=receipt_of(request, admission, started, admits=admits),
            session=(payload.scope, payload.session) if payload else None,
            held=admission.held,
            owned_from=plan.prefix,
            node=admission.node,
            pending=deque(self._chunks(plan.prefills)),
            computed=plan.prefix,
            on_end=self._ended,
            states=dict(admission.states),
            spans=admission.spans,
            reuse=request.reuse,
            carried=admission.carried,
            admits=admits,
            index=self._admitter,
            on_retained=partial(self._retained, admission, retires=retires),
            gate=self._gate(request, admission),
        )

    def _gate(self, request: GenerationRequest, admission: Admission) -> MarginGate | None:
        """Return the gate of a request that copies for reuse; None if it wants none."""
        asked = request.reuse
        if asked is None or not asked.margin or not admission.plan.reused:
            return None
        return MarginGate(request, asked.margin, self._admitter, self._chunks, self._retained)

    def _chunks(self, prefills: Series[Prefill]) -> list[Prefill]:
        """Return prefills in chunks; one that leaves a state in its middle is two."""
        size, grid = self._chunk_tokens, self.cache.anchors.grid
        chunks = [
            Prefill(start, min(start + size, step.end))
            for step in prefills
            for start in range(step.start, step.end, size)
        ]
        halves = [
            (chunk.start, chunk.end - (chunk.end - chunk.start) % grid, chunk.end)
            for chunk in chunks
        ]
        return [Prefill(*pair) for each in halves for pair in pairwise(each) if pair[0] < pair[1]]

    def _forward(self, tokens: list[int], start: int, cache: WorkingCache) -> torch.Tensor:
        positions = torch.arange(start, start + len(tokens), device=self._device)
        with torch.inference_mode():
            output = self._model(
                input_ids=torch.tensor([tokens], device=self._device),
                position_ids=positions[None],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        logits: torch.Tensor = output.logits[0, -1].float()
        return logits

    def _metered(self, request: GenerationRequest, energy: EnergyAccount) -> Forward:
        """Return forwards whose tokens are counted for a request."""

        def forward(tokens: list[int], start: int, cache: WorkingCache) -> torch.Tensor:
            energy.computed(request.request_id, len(tokens))
            return self._forward(tokens, start, cache)

        return forward

    def _ended(self, sequence: Sequence) -> None:
        self._running.discard(sequence)
        if self._energy is not None:
            self._energy.ended(sequence.receipt.message_id)

    def levels(self) -> PoolLevels:
        """Return slots by owner, as metrics show them; looks at no node."""
        holds = self.claims.keeper.holds()
        return self.cache.levels(held_by_claims(holds, self.cache.page_tokens))

    def read_levels(self) -> None:
        """Set the metrics to the present levels."""
        self.metrics.pool(self.levels())
        self.metrics.registries(RegistryLevels.of(self.cache.registry, self.cache.ledger))
        if self._energy is not None:
            self._energy.settle()

    def stats(self) -> PoolStats:
        """Return slots by owner."""
        return self.cache.stats(sum(len(sequence.owned) for sequence in self._running))

    def check_integrity(self) -> None:
        """Check that every slot is owned once.

        Raises:
            IntegrityError: says what doesn't add up.
        """
        self.cache.check_integrity(
            [sequence.owned for sequence in self._running],
            [*(sequence.node for sequence in self._running), *self.claims.shelf.locked()],
            [slot for sequence in self._running for slot in sequence.states.values()],
        )
        self.claims.shelf.check_integrity()

    @property
    def busy(self) -> bool:
        """True if a request runs."""
        return bool(self._running)

    def flush(self) -> None:
        """Forget all cached sequences and retained turns that no running request holds."""
        self.cache.flush()


def _kv_facts(layout: KVLayout, tokens: int, page_tokens: int) -> KVFacts:
    return KVFacts(
        pool_class=layout.pool_class,
        dtype=str(layout.kept).removeprefix("torch."),
        layers=layout.layers,
        bytes_per_token=layout.bytes_per_token,
        capacity_tokens=tokens,
        page_tokens=page_tokens,
    )


def _state_facts(anchors: AnchorStore) -> StateFacts | None:
    states = anchors.states
    if not anchors.needed:
        return None
    return StateFacts(
        window=anchors.window,
        recurrent_layers=len({form.place for form in states.forms}) if states else 0,
        edits=RecurrentEdits.KEPT.value if states else "",
        bytes_per_state=states.bytes_per_state if states else 0,
        slots=states.capacity if states else 0,
        window_tokens=anchors.window_tokens,
        anchor_tokens=anchors.grid,
    )
