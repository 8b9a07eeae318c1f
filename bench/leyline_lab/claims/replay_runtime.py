"""The replay engine as the litmus suite of claims drives it: one request at a time, by hand."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import cache, partial
from random import Random

from leyline_engine.claims.book import ClaimBook
from leyline_engine.claims.events import AnyEvent, EventLedger, Run
from leyline_engine.contract import (
    Claim,
    ClaimRefusal,
    CopySegment,
    EditPayload,
    SourceRef,
)
from leyline_lab.claims.litmus import (
    LIMITS,
    Runtime,
    session_of,
    unit_of,
)
from leyline_lab.claims.micro import Request
from leyline_lab.claims.replay_watch import WatchedClaims
from leyline_replay.engine import GenerationRequest, RefusedByClaimError, ReplayEngine
from leyline_replay.models.loader import LoadedModel, load_model

_TENANT = "a"
"""Tenant whose turns are edited."""


def open_replay(usable: int, sink: Callable[[AnyEvent], None], page: int = 1) -> Runtime:
    """Open a replay engine over the shipped model.

    Args:
        usable: pages of the pool.
        sink: gets every event.
        page: tokens per page of its tree.
    """
    return ReplayRuntime(usable, sink, page)


class ReplayRuntime:
    """A replay engine as a :class:`leyline_lab.claims.litmus.Runtime`.

    A source's name fixes its tokens, also where the model would have sampled others: they are fed
    as if they had been sampled.
    """

    def __init__(self, usable: int, sink: Callable[[AnyEvent], None], page: int) -> None:
        ledger = EventLedger(sink=sink)
        self.unit = unit_of(page)
        self.engine = ReplayEngine(
            _model(),
            pool_tokens=usable * self.unit,
            page_tokens=page,
            open_claims=partial(WatchedClaims, limits=LIMITS, ledger=ledger),
        )
        self._keeper = self.engine.claims.keeper
        self._sources: dict[str, int] = {}
        self._owners: dict[str, tuple[str, str]] = {}

    @property
    def book(self) -> ClaimBook:
        """The engine's book."""
        return self._keeper.book

    def serve(self, request: Request) -> ClaimRefusal | None:
        """Run a request to its end, or return why it can't run before a claim ends."""
        total = request.prompt_tokens + request.max_new_tokens + 1
        tokens = self._tokens(request.source, total)
        payload = EditPayload(session=request.session, scope=request.tenant, turn=request.source)
        return self._run(
            GenerationRequest(
                request.name,
                tokens[: request.prompt_tokens],
                payload,
                max_new_tokens=request.max_new_tokens,
                admits=not request.write_no_admit,
            ),
            tokens[request.prompt_tokens :],
        )

    def _tokens(self, source: str, length: int) -> array[int]:
        """Return the first tokens of a source; no two sources begin alike."""
        vocabulary = self.engine.capability.vocab_size
        number = self._sources.setdefault(source, len(self._sources))
        stream = Random(source)
        return array("q", [number, *(stream.randrange(vocabulary) for _ in range(length - 1))])

    def _run(self, request: GenerationRequest, output: array[int]) -> ClaimRefusal | None:
        """Run a request whose answer is ``output``; its last token has no KV."""
        try:
            sequence = self.engine.admit(request)
        except RefusedByClaimError as error:
            return error.refusal
        while sequence.pending:
            sequence.prefill_step()
        for token in output[:-1]:
            sequence.decode_step(token)
        sequence.finish(output[-1])
        self.engine.check_integrity()
        if request.payload is not None:
            owner = (request.payload.scope, request.payload.session)
            self._owners[request.payload.turn] = owner
        return None

    def edit(self, name: str, old: str, new: str, start: int, end: int) -> None:
        """Run an edited turn of tenant ``a`` to its end."""
        session = session_of(_TENANT)
        registry = self.engine.cache.registry
        source = registry.get((_TENANT, session), old)
        if source is None:
            raise KeyError(old)
        unit = self.unit
        first, last, length = start * unit, end * unit, len(source.tokens) - 1
        prompt = source.tokens[:first] + source.tokens[last:length]
        payload = EditPayload(
            session=session,
            scope=_TENANT,
            turn=new,
            sources=(SourceRef(old, len(source.tokens), registry.seal(source)),),
            segments=(CopySegment(0, 0, first, 0), CopySegment(0, last, length, first)),
            lineage=source.lineage,
        )
        request = GenerationRequest(name, prompt, payload, max_new_tokens=unit)
        refusal = self._run(request, self._tokens(new, unit + 1))
        if refusal is not None:
            raise RefusedByClaimError(refusal)

    def claim(self, claim: Claim) -> None:
        """Take a claim."""
        self._keeper.submit(claim)

    def release(self, tenant: str, claim: str) -> None:
        """End a claim."""
        self._keeper.release(tenant, claim)

    def demote(self, tenant: str, claim: str) -> None:
        """Give up a claim's locks."""
        self._keeper.demote(tenant, claim)

    def tick(self, order: int, now_ms: int) -> None:
        """Take the clock's next message."""
        self._keeper.tick(order, now_ms)

    def lose(self, run: Run, cause: str) -> None:
        """Drop the cached pages of a source from a page on."""
        turn = self.engine.cache.registry.get(self._owners[run.source], run.source)
        if turn is None:
            raise KeyError(run.source)
        self.engine.cache.lose(turn.keys(), run.start * self.unit, cause)


@cache
def _model() -> LoadedModel:
    return load_model(device="cpu")
