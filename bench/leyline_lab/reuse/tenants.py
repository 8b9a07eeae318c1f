"""Reuse between tenants on the replay engine, with a record of who computed each slot.

Requests of several tenants run at once, a step of each in turn. The tokens that sharing could have
served are counted independently of the engine's index: runs of 64 tokens or more that only other
tenants' sequences in the radix tree have, as the request arrives.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from leyline_engine.contract import (
    ATTENTION_SINK,
    EditPayload,
    ReuseMode,
    ReusePayload,
)
from leyline_engine.records.lineage import MAX_TOKEN
from leyline_replay.cache.listener import CacheListener
from leyline_replay.cache.radix import Node, RadixTree
from leyline_replay.cache.slots import Slots
from leyline_replay.engine import GenerationRequest, ReplayEngine
from leyline_replay.models.loader import LoadedModel
from leyline_replay.sequence import Sequence as Running

from .verbatim_runs import MIN_RUN, Mask, Windows

_NOBODY = -1


@dataclass(frozen=True, slots=True)
class TenantRequest:
    """A prompt in tokens, and the tenant and session that send it."""

    tenant: int
    session: str
    tokens: array[int]


@dataclass(frozen=True, slots=True)
class TenantSample:
    """The tokens of one request, by the origin of their KV."""

    prompt: int
    prefix: int
    own: int
    """Reused from the tenant's own sessions."""
    group: int
    """Reused from other tenants."""
    shareable: int
    """In runs that only other tenants' live sequences have."""
    shared: int
    """Those of them that aren't prefilled."""
    foreign_slots: int
    """Slots of other tenants that it read or copied, by the record of who wrote them."""


class _SlotRecord(CacheListener):
    """Notes which tenant wrote each slot, and counts what tenants read of others' slots."""

    def __init__(self, engine: ReplayEngine) -> None:
        self.writer = np.full(engine.cache.capacity, _NOBODY)
        self.tenant = _NOBODY
        """Tenant on whose behalf the engine works now."""
        self.foreign = 0
        """Number of others' slots that were read since the last reset."""
        self._pool = pool = engine.cache.pool
        self._write, self._copy = pool.write, pool.copy
        pool.write, pool.copy = self.write, self.copy  # type: ignore[method-assign]
        engine.cache.listener = self

    def write(
        self, slots: Slots, start: int, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Note who wrote slots."""
        self._write(slots, start, layers)
        self.writer[slots] = self.tenant

    def copy(self, source: Slots, target: Slots, start: int) -> None:
        """Note whose slots are copied, and for whom."""
        self.foreign += self._others(source)
        self._copy(source, target, start)
        self.writer[target] = self.tenant

    def matched(self, request: str, slots: Slots) -> None:
        """Note whose slots are read as a prefix."""
        self.foreign += self._others(slots)

    def _others(self, slots: Slots) -> int:
        return int((self.writer[slots] != self.tenant).sum())


class TenantBench:
    """Serves requests on one engine, whose caches stay from one round to the next.

    Args:
        groups: groups that every request names; none: nothing is shared.
        slots: size of the pool.
        length: number of tokens that are generated for each request.
    """

    def __init__(
        self, model: LoadedModel, slots: int, *, groups: tuple[str, ...], length: int = 4
    ) -> None:
        self.engine = ReplayEngine(model, pool_tokens=slots)
        self._record = _SlotRecord(self.engine)
        self._reuse = ReusePayload(mode=ReuseMode.LIVE, groups=groups)
        self._length = length
        self._count = 0

    def serve(
        self, requests: Sequence[TenantRequest], concurrency: int, advance: Callable[[], None]
    ) -> list[TenantSample]:
        """Serve requests in order, ``concurrency`` at once.

        Args:
            advance: called after each request.
        """
        waiting, running = deque(requests), deque[tuple[int, Running, list[int]]]()
        samples = []
        while waiting or running:
            while waiting and len(running) < concurrency:
                request = waiting.popleft()
                sample, sequence = self._admit(request)
                samples.append(sample)
                running.append((request.tenant, sequence, []))
            tenant, sequence, tokens = running.popleft()
            self._record.tenant = tenant
            if self._step(sequence, tokens):
                running.append((tenant, sequence, tokens))
            else:
                sequence.finish(tokens[-1])
                advance()
        return samples

    def _admit(self, request: TenantRequest) -> tuple[TenantSample, Running]:
        self._count += 1
        self._record.tenant, self._record.foreign = request.tenant, 0
        theirs, own = self._live(request)
        payload = EditPayload(session=request.session, scope=f"tenant{request.tenant}", turn="t")
        wanted = GenerationRequest(
            f"r{self._count}", request.tokens, payload, self._reuse, max_new_tokens=self._length
        )
        sequence = self.engine.admit(wanted)
        return self._sample(sequence, theirs & ~own), sequence

    def _live(self, request: TenantRequest) -> tuple[Mask, Mask]:
        """Return which of a prompt's tokens other tenants' sequences have, and which the own."""
        pieces: dict[bool, list[array[int]]] = {True: [], False: []}
        for tokens, last in live_paths(self.engine.cache.tree):
            own = self.writer_of(last) == request.tenant
            if len(tokens) >= ATTENTION_SINK + MIN_RUN:
                pieces[own].append(tokens[ATTENTION_SINK:])
        prompt = request.tokens[ATTENTION_SINK:-1]
        theirs, own_mask = (Windows(pieces[own], MIN_RUN).covered(prompt) for own in (False, True))
        return theirs, own_mask

    def writer_of(self, slot: int) -> int:
        """Return the tenant that wrote a slot."""
        return int(self._record.writer[slot])

    def _sample(self, sequence: Running, shareable: Mask) -> TenantSample:
        """Return the sample of a request that was admitted; nothing of it ran yet."""
        counts, reuse = sequence.receipt.tokens, sequence.receipt.reuse
        group = reuse.group if reuse is not None else 0
        served = np.ones(counts.prompt, dtype=np.bool_)
        for step in sequence.pending:
            served[step.start : step.end] = False
        shareable[: max(0, counts.prefix - ATTENTION_SINK)] = False
        return TenantSample(
            prompt=counts.prompt,
            prefix=counts.prefix,
            own=counts.reused - group,
            group=group,
            shareable=int(shareable.sum()),
            shared=int((shareable & served[ATTENTION_SINK:-1]).sum()),
            foreign_slots=self._record.foreign,
        )

    def _step(self, sequence: Running, tokens: list[int]) -> bool:
        """Run one step; returns False when the request has its tokens."""
        if tokens:
            logits: torch.Tensor | None = sequence.decode_step(tokens[-1])
        else:
            logits = sequence.prefill_step()
        if logits is not None:
            tokens.append(int(logits.argmax()))
        return len(tokens) < self._length


def live_paths(tree: RadixTree) -> Iterator[tuple[array[int], int]]:
    """Yield the token ids of every sequence in a tree, and its last slot."""
    stack: list[tuple[Node, array[int]]] = [(tree.root, array("q"))]
    while stack:
        node, before = stack.pop()
        path = before + node.keys
        if node.children:
            stack.extend((child, path) for child in node.children.values())
        elif path:
            yield array("q", (key & MAX_TOKEN for key in path)), int(node.slots[-1])
