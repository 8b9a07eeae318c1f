"""A session after a transcript of it: what the turn leaves there, and what it leaves alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
from support.character_turns import turn_of
from support.fake_engine import FakeEngine
from support.replicas import replica_over
from support.sessions import after_turn, blank, history

from leyline_engine.contract import Receipt
from leyline_proxy.model.messages import Message
from leyline_proxy.model.session import Session
from leyline_proxy.model.verdicts import Verdict
from leyline_proxy.plan.busts import CacheAccount
from leyline_proxy.plan.planning import Planned
from leyline_proxy.plan.synthesis import TurnPlan
from leyline_proxy.request.identify import NAMED, Identity
from leyline_proxy.request.parse import parse_chat
from leyline_proxy.settings import Settings
from leyline_proxy.tenants import build_directory
from leyline_proxy.turns.placing import Placing
from leyline_proxy.turns.retaining import session_after
from leyline_proxy.turns.settled import SettledTurn
from leyline_proxy.turns.turn import Turn
from leyline_proxy.upstream.pool import ReplicaPool

TRANSCRIPT: list[Message] = [{"role": "user", "content": "Summarise what the agent did."}]
STATES = {"0.masking": {"seen": 4}}
TEXTS = {"0.summarize:q": "a text"}
_BODY = msgspec.json.encode({"model": "m", "messages": TRANSCRIPT})
VERDICT = Verdict(("t3-1.0",), (1,), "guard", "injection", "policy")


@dataclass
class Engine:
    """An engine's replica, and the places of sessions."""

    pool: ReplicaPool
    placing: Placing

    def after(self, known: Session, now: Session | None = None, **facts: Any) -> Session:
        """A session after a turn that was planned when it was `known`.

        Args:
            now: its state when the turn ends; None if nothing happened meanwhile.
            facts: members of the turn's identity.
        """
        replica = self.pool.get("a")
        assert replica is not None
        source = replace(turn_of(TRANSCRIPT, name="t3-1"), index=known.next_index)
        verdicts = (VERDICT,)
        turn = Turn(
            request=parse_chat(_BODY, {}, build_directory(Settings()).authenticate({})),
            identity=Identity("s", NAMED, (), known, "name", **facts),
            index=known.next_index,
            name=source.turn,
            message_id="m-3",
            planned=Planned(source.prepared, None, source.names, TurnPlan(), verdicts=verdicts),
            replica=replica,
            status=replica.status,
            body=b"",
            enveloped=True,
            unnamed=known.unnamed,
            unvouched=known.unvouched,
            demands=known.demands,
            untraced=0,
            searched=False,
            applied=[],
        )
        settled = SettledTurn(
            turn=turn,
            receipt=Receipt(message_id="m-3"),
            record=None,
            usage=None,
            run=replica.status.retains_as,
            source=replace(source, retells=turn.identity.retells),
            cache=CacheAccount(),
            model="m",
            avoided_s=0.0,
        )
        return session_after(now or known, settled, self.placing, keep=4, now=9.0)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    """A replica that is up."""
    pool = ReplicaPool([replica_over(FakeEngine(), "a")])
    await pool.refresh()
    yield Engine(pool, Placing(pool))
    await pool.aclose()


def worked() -> Session:
    """A session of two turns that the proxy has known from the first."""
    session = blank("s", key=NAMED)
    for count in (1, 2):
        session = after_turn(session, history(count))
    return replace(session, policy_states=STATES, completions=TEXTS)


async def test_a_forget_after_a_transcript_is_one_of_everything(engine: Engine) -> None:
    """The transcript's texts have other names, so that no forget of one finds them."""
    session = worked()
    assert not session.unvouched
    assert engine.after(session, retells=True).unvouched
    assert not engine.after(session).unvouched


async def test_a_transcript_with_what_was_forgotten_meanwhile_is_no_source(engine: Engine) -> None:
    """It was planned before the forget, and its summary may say what is forgotten."""
    session = worked()
    forgotten = replace(session, demands=1)
    assert engine.after(session, retells=True).turns[-1].retells
    after = engine.after(session, forgotten, retells=True)
    assert after.turns == session.turns
    # The KV is there all the same, without a name.
    assert after.unnamed == session.unnamed + 1
    assert engine.after(forgotten, retells=True).turns[-1].retells
    assert engine.after(session, forgotten).turns[-1].turn == "t3-1"


async def test_a_transcript_leaves_what_policies_know_alone(engine: Engine) -> None:
    """They have seen the transcript, not the session's list; their verdicts count."""
    after = engine.after(worked(), retells=True)
    assert (after.policy_states, after.completions) == (STATES, TEXTS)
    assert after.verdicts == (VERDICT,)
    own = engine.after(worked())
    assert (own.policy_states, own.completions, own.verdicts) == ({}, {}, (VERDICT,))
