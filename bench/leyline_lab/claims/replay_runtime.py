"""The replay engine as the litmus suite of claims drives it: one request at a time, by hand."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import cache, partial

from leyline_engine.claims.events import AnyEvent, EventLedger, Run
from leyline_engine.contract import (
    ClaimRefusal,
    EditPayload,
)
from leyline_lab.claims.desk_runtime import DeskRuntime
from leyline_lab.claims.litmus import (
    LIMITS,
    Runtime,
    unit_of,
)
from leyline_lab.claims.micro import Request
from leyline_lab.claims.replay_watch import WatchedClaims
from leyline_replay.engine import GenerationRequest, RefusedByClaimError, ReplayEngine
from leyline_replay.models.loader import LoadedModel, load_model


def open_replay(usable: int, sink: Callable[[AnyEvent], None], page: int = 1) -> Runtime:
    """Open a replay engine over the shipped model.

    Args:
        usable: pages of the pool.
        sink: gets every event.
        page: tokens per page of its tree.
    """
    return ReplayRuntime(usable, sink, page)


class ReplayRuntime(DeskRuntime):
    """A replay engine as a :class:`leyline_lab.claims.litmus.Runtime`."""

    def __init__(self, usable: int, sink: Callable[[AnyEvent], None], page: int) -> None:
        ledger = EventLedger(sink=sink)
        unit = unit_of(page)
        self.engine = ReplayEngine(
            _model(),
            pool_tokens=usable * unit,
            page_tokens=page,
            open_claims=partial(WatchedClaims, limits=LIMITS, ledger=ledger),
        )
        super().__init__(self.engine.claims.keeper, self.engine.cache.registry, unit)

    def run(
        self, request: Request, prompt: array[int], payload: EditPayload, max_new_tokens: int
    ) -> ClaimRefusal | None:
        """Run a prompt; see :meth:`.DeskRuntime.run`."""
        wanted = GenerationRequest(
            request.name,
            prompt,
            payload,
            # The last token that is generated has no KV, and is no part of the engine's reserve.
            max_new_tokens=max(1, max_new_tokens - 1),
            admits=not request.write_no_admit,
        )
        try:
            sequence = self.engine.admit(wanted)
        except RefusedByClaimError as error:
            return error.refusal
        logits = None
        while logits is None:
            logits = sequence.prefill_step()
        for _ in range(max_new_tokens - 1):
            logits = sequence.decode_step(int(logits.argmax()))
        sequence.finish(int(logits.argmax()))
        self.engine.check_integrity()
        return None

    def lose(self, run: Run, cause: str) -> None:
        """Drop the cached pages of a source from a page on."""
        keys = self.source(run.source).keys()
        self.engine.cache.lose(keys, run.start * self.unit, cause)


@cache
def _model() -> LoadedModel:
    return load_model(device="cpu")
