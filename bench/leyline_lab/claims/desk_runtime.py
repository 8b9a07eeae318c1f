"""The litmus suite's runtime on engines that are driven by hand, one request at a time.

What a case asks of them becomes prompts and envelopes; each engine's own runtime runs those.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from array import array

from leyline_engine.claims.book import ClaimBook
from leyline_engine.claims.events import Run
from leyline_engine.claims.keeper import ClaimKeeper
from leyline_engine.contract import (
    Claim,
    ClaimRefusal,
    Directive,
    EditPayload,
    SourceRef,
    token_array,
)
from leyline_engine.records.sources import SourceRegistry, SourceTurn
from leyline_lab.claims.litmus import session_of
from leyline_lab.claims.micro import Request

TENANT = "a"
"""Tenant whose turns are edited."""


class DeskRuntime(ABC):
    """An engine with a keeper of claims as a :class:`leyline_lab.claims.litmus.Runtime`.

    Args:
        keeper: of its claims.
        registry: its retained turns.
        unit: tokens per page of a case.
    """

    def __init__(self, keeper: ClaimKeeper, registry: SourceRegistry, unit: int) -> None:
        self.unit = unit
        self._keeper = keeper
        self._registry = registry

    @abstractmethod
    def run(
        self, request: Request, prompt: array[int], payload: EditPayload, max_new_tokens: int
    ) -> ClaimRefusal | None:
        """Run a prompt to its end, or return why it can't run before a claim ends."""

    @abstractmethod
    def lose(self, run: Run, cause: str) -> None:
        """Drop the cached pages of a source from a page on."""

    @property
    def book(self) -> ClaimBook:
        """The book of claims."""
        return self._keeper.book

    def serve(self, request: Request) -> ClaimRefusal | None:
        """Run a request to its end, or return why it can't run before a claim ends."""
        payload = EditPayload(session=request.session, scope=request.tenant, turn=request.source)
        tokens = _tokens_of(request.source, request.prompt_tokens)
        # The last token that is generated has no KV.
        return self.run(request, tokens, payload, request.max_new_tokens + 1)

    def edit(self, name: str, old: str, new: str, start: int, end: int) -> None:
        """Run an edited turn; see :meth:`leyline_lab.claims.litmus.Runtime.edit`."""
        session = session_of(TENANT)
        source = self.source(old)
        cut, resume = start * self.unit, end * self.unit
        payload = EditPayload(
            session=session,
            scope=TENANT,
            turn=new,
            sources=(SourceRef(old, len(source.tokens), self._registry.seal(source)),),
            directives=(Directive(cut, resume),),
            lineage=tuple(run for run in source.lineage if run.start < cut),
        )
        prompt = source.tokens[:cut] + source.tokens[resume:] + _tokens_of(new, self.unit)
        self.run(Request(name, TENANT, session, new, len(prompt)), prompt, payload, 1)

    def source(self, name: str) -> SourceTurn:
        """Return a retained turn.

        Raises:
            ValueError: there is none of this name.
        """
        found = self._registry.get((TENANT, session_of(TENANT)), name)
        if found is None:
            raise ValueError(f"no turn {name} is retained")
        return found

    def claim(self, claim: Claim) -> None:
        """Take a claim; see :class:`leyline_lab.claims.litmus.Runtime`."""
        self._keeper.submit(claim)

    def release(self, tenant: str, claim: str) -> None:
        """End a claim; see :class:`leyline_lab.claims.litmus.Runtime`."""
        self._keeper.release(tenant, claim)

    def demote(self, tenant: str, claim: str) -> None:
        """Give up a claim's locks; see :class:`leyline_lab.claims.litmus.Runtime`."""
        self._keeper.demote(tenant, claim)

    def tick(self, order: int, now_ms: int) -> None:
        """Take the clock's next message; see :class:`leyline_lab.claims.litmus.Runtime`."""
        self._keeper.tick(order, now_ms)


def _tokens_of(source: str, count: int) -> array[int]:
    """Return tokens with which only this source begins."""
    rng = random.Random(source)
    return token_array(rng.randrange(10, 400) for _ in range(count))
