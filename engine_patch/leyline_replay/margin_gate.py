"""The margin gate: a prefill whose reuse isn't trusted is undone, and run again without reuse.

It acts after the last chunk of the prompt and before anything of it is published, so nobody else
has seen what is undone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Series
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from leyline_engine.admit.plan import Prefill
from leyline_engine.records.sources import SourceTurn
from leyline_engine.reuse.margin import measured, top_margins
from leyline_replay.admission import Admission, Admitter
from leyline_replay.cache.manager import CacheManager
from leyline_replay.cache.working import WorkingCache
from leyline_replay.receipts import receipt_of
from leyline_replay.requests import GenerationRequest
from leyline_replay.sequence import Sequence


@dataclass(frozen=True, slots=True)
class MarginGate:
    """The gate of one request that copies for reuse; it judges once.

    Attributes:
        threshold: the smallest margin that is trusted.
        admitter: admits the request again.
        chunks: cuts prefills into steps.
        retained: called with the admission and the turn that the request became.
    """

    request: GenerationRequest
    threshold: float
    admitter: Admitter
    chunks: Callable[[Series[Prefill]], Iterable[Prefill]]
    retained: Callable[[Admission, SourceTurn], None]

    def __call__(self, sequence: Sequence, logits: torch.Tensor) -> bool:
        """Judge a prefill; see :attr:`Sequence.gate`."""
        margin = measured(float(top_margins(logits[None])))
        gated = margin is not None and margin < self.threshold and self._fits(sequence)
        if gated:
            self._undo(sequence)
        receipt = sequence.receipt
        if receipt.reuse is not None:
            counts = msgspec.structs.replace(receipt.reuse, margin=margin, gated=gated)
            sequence.receipt = msgspec.structs.replace(receipt, reuse=counts)
        return gated

    def _fits(self, sequence: Sequence) -> bool:
        """Return True if the request surely finds slots again once it has given its own back.

        It doesn't if a forget took its prefix, and others took the room.
        """
        prompt = self.request.tokens
        wanted = len(prompt) - len(self.admitter.cached(prompt, self.request.payload))
        return wanted <= len(sequence.owned) + sequence.cache.free_count

    def _undo(self, sequence: Sequence) -> None:
        """Let a sequence begin again, without reuse."""
        started, request, before = time.perf_counter_ns(), self.request, sequence.receipt
        sequence.give_back()
        admission = self.admitter.admit(
            request.request_id, request.tokens, request.payload, reuse=request.reuse, reuses=False
        )
        plan, node = admission.plan, sequence.node
        sequence.held, sequence.owned_from = admission.held, plan.prefix
        sequence.node = admission.node
        # Only now: until here, the request's cached beginning could not be evicted.
        sequence.cache.unlock(node)
        sequence.lineage, sequence.carried = admission.lineage, admission.carried
        sequence.states = dict(admission.states)
        sequence.pending, sequence.computed = deque(self.chunks(plan.prefills)), plan.prefix
        sequence.on_retained = partial(self.retained, admission)
        load(sequence.working, sequence.cache, admission)
        receipt = receipt_of(request, admission, started, admits=True)
        sequence.receipt = msgspec.structs.replace(
            receipt, turn=before.turn, splice_us=before.splice_us + receipt.splice_us
        )


def load(working: WorkingCache, cache: CacheManager, admission: Admission) -> None:
    """Place what an admission found and copied where the model reads it."""
    plan, pool, states = admission.plan, cache.pool, cache.anchors.states
    spans = [(0, plan.prefix), *((copy.dest, copy.dest_end) for copy in plan.copies)]
    for start, end in spans:
        for layer in range(pool.layout.layers if end > start else 0):
            working.fill(layer, start, pool.read(layer, admission.held[start:end]))
    if states is not None:
        found = None if admission.start is None else states.read(admission.start)
        working.set_state(plan.prefix if found or not plan.prefix else -1, found)
