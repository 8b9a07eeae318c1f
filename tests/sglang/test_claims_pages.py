"""Claims where SGLang's pages hold more than one token."""

from __future__ import annotations

import pytest
from claim_scheduler import ClaimScheduler, opens, text

from leyline_engine.contract import ClaimState, ProblemCode
from leyline_engine.sglang.claim_desk import ClaimDesk

pytestmark = pytest.mark.usefixtures("server_args")


@pytest.mark.parametrize("page_size", [1, 16])
def test_claims_need_pages_of_one_token(page_size: int) -> None:
    """A claim on a server with larger pages is refused by name, and nothing is locked."""
    scheduler = ClaimScheduler(100)
    engine = scheduler.engine
    engine.claims = ClaimDesk(
        scheduler.cache, engine.registry, usable=scheduler.capacity, page_size=page_size
    )
    scheduler.serve(text("s", 30), opens("s"))
    reply = scheduler.try_claim("s", 20)
    if page_size == 1:
        assert reply.problem is None
        assert scheduler.status().state is ClaimState.MATERIALIZED
        return
    assert reply.problem is not None
    assert reply.problem.code is ProblemCode.UNSUPPORTED
    assert "--page-size 1" in reply.problem.message
    assert scheduler.cache.protected_size() == 0
