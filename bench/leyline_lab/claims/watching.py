"""Records that the watches of several engines make: a request's arrival, and what it leaves."""

from __future__ import annotations

from collections.abc import Sequence

from leyline_engine.claims.events import Arrived, Matched, Retained
from leyline_engine.claims.keeper import ArrivingRequest, ClaimKeeper
from leyline_engine.claims.runs import count, without


def record_arrival(
    keeper: ClaimKeeper, request: ArrivingRequest, matched: Sequence[int], *, admits: bool
) -> None:
    """Record that a request begins.

    Args:
        matched: slots of its cached prefix, of whole pages.
        admits: True if what it computes may be kept.
    """
    arithmetic = keeper.book.arithmetic
    needed = arithmetic.needed(request.prompt_tokens, request.max_new_tokens)
    keeper.ledger.append(
        Arrived(
            request=request.name,
            tenant=request.tenant,
            session=request.session,
            source=request.source,
            prompt=-(-request.prompt_tokens // arithmetic.page_size),
            pages=arithmetic.pages(needed),
            write_no_admit=not admits,
        )
    )
    if runs := keeper.names.known(matched):
        keeper.ledger.append(Matched(request=request.name, runs=runs))


def record_retained(
    keeper: ClaimKeeper, request: str, source: str, slots: Sequence[int], free: int
) -> None:
    """Record tokens that became matchable, if there are any, and the names of their path.

    Args:
        source: the turn that the request brings.
        slots: the cached path to its end.
        free: free pages.
    """
    before = keeper.names.known(slots)
    path = keeper.names.name(source, slots)
    new = without(path, before)
    if count(new):
        keeper.ledger.append(Retained(request=request, runs=new, path=path, free=free))
