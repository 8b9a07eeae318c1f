"""A session after a quarantine on demand, and its next turn's plan."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from support.fake_engine import CAPABILITY, FakeEngine
from support.replicas import replica_over
from support.sessions import after_turn, blank, history, sessions

from leyline_engine.contract import output_span
from leyline_proxy.model.asides import Anchor, Aside, RecallCall
from leyline_proxy.model.places import owed
from leyline_proxy.model.session import Place, Session
from leyline_proxy.model.verdicts import Verdict
from leyline_proxy.telemetry.metrics import Metrics
from leyline_proxy.turns.placing import Placing
from leyline_proxy.turns.quarantine import condemned
from leyline_proxy.upstream.pool import ReplicaPool

VERDICT = Verdict(("t0-2.3",), (1,), "verbs", "verdict", "api")


@pytest.fixture
async def placing() -> AsyncIterator[Placing]:
    """The places of one engine."""
    pool = ReplicaPool([replica_over(FakeEngine(capability=CAPABILITY), "a", metrics=Metrics())])
    await pool.refresh()
    yield Placing(pool)
    await pool.aclose()


def talked() -> Session:
    """A session of three turns, two of whose engines are known."""
    session = blank("s")
    for turn in (1, 2, 3):
        session = after_turn(session, history(turn))
    places = {"run-a": Place("a"), "run-b": Place("b", changes=4)}
    written = Aside(Anchor(1, 0), (RecallCall("r0", "{}", 0),), reasoning="a text")
    texts = {"completions": {"0.summarize": "a text"}, "asides": (written,)}
    return replace(session, places=places, **texts)


async def test_every_place_owes_a_forget(placing: Placing) -> None:
    """The demand is counted, so that turns under way owe it too; nothing derived is left."""
    session = talked()
    after = condemned(session, [VERDICT], placing)
    assert owed(after.places) == {"run-a": "a", "run-b": "b"}
    assert after.places["run-b"].changes == 5
    assert after.demands == session.demands + 1
    assert (after.verdicts, after.completions, after.asides) == ((VERDICT,), {}, ())
    assert condemned(after, [VERDICT], placing) is after


async def test_kv_without_a_name_may_be_anywhere(placing: Placing) -> None:
    """A session that lost account of itself is forgotten by all engines, seen or not."""
    everywhere = set(placing.anywhere())
    assert everywhere
    for lost in (replace(talked(), unnamed=1), replace(talked(), unvouched=True)):
        assert set(owed(condemned(lost, [VERDICT], placing).places)) >= everywhere


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(sessions(["keep_all", "truncate_older_than:n=1,max_chars=30"]))
def test_no_token_is_left_and_no_name_is_lost(session: Session) -> None:
    """The newest list keeps its names; every other message and answer is known by its past ones."""
    after = session.without_tokens()
    assert all(not turn.tokens and not turn.lineage for turn in after.turns)
    assert len(after.turns) == min(1, len(session.turns))
    if session.last is not None and after.last is not None:
        assert after.last.names == session.last.names
        if after.unnamed == session.unnamed:
            past = {name for names in after.departed.messages.values() for name in names}
            known = past | set(after.departed.outputs) | {n.id for n in after.last.names.client}
            for turn in session.turns:
                assert {name.id for name in turn.names.client} <= known
                assert not turn.output_ids or output_span(turn.turn) in known
        again = after_turn(after, session.last.prepared.client)
        assert again.turns[-1].names.client == session.last.names.client
