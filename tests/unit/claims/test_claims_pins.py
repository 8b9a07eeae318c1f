"""Pinned messages: their claims follow the conversation, beside its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from support.claims_engine import ClaimsEngine, text_of
from support.clock import Clock
from support.fake_engine import MODEL, proxy_before

from leyline_engine.contract import ClaimKind, ReleaseClaim
from leyline_policies.verbs import pin
from leyline_proxy.claims.pinning import RETRY_S
from leyline_proxy.model.undeclared import UndeclaredRules

PLAN = "The plan is to begin with the first file."
EXACT = UndeclaredRules()
Messages = list[dict[str, Any]]


class Talk:
    """A session whose turns wait until their pins are done."""

    def __init__(self, client: httpx.AsyncClient, app: Any, clock: Clock) -> None:
        self._client = client
        self._pinning = app.state.services.ends._pinning
        self.claims = app.state.services.claims
        self.clock = clock

    async def turn(
        self, messages: Messages, session: str = "s", *, waits: bool = True
    ) -> dict[str, Any]:
        """One turn; the member ``leyline`` of its answer."""
        answer = await self._client.post(
            "/v1/chat/completions",
            json={"model": MODEL, "messages": messages},
            headers={"x-leyline-session": session},
        )
        assert answer.status_code == 200, answer.text
        if waits:
            await asyncio.gather(*self._pinning._running.values())
        account: dict[str, Any] = answer.json()["leyline"]
        return account


@asynccontextmanager
async def talking(
    engine: ClaimsEngine, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> AsyncIterator[Talk]:
    """A session before ``engine``."""
    apps: list[Any] = []
    clock = Clock(1000.0)
    monkeypatch.setattr("support.fake_engine.create_app", _remembering(apps))
    async with proxy_before(engine, **{"claims_interval_s": 60, **settings}) as client:
        apps[0].state.services.ends._pinning._clock = clock
        yield Talk(client, apps[0], clock)


def _remembering(apps: list[Any]) -> Any:
    from leyline_proxy.http.app import create_app

    def create(*args: Any, **options: Any) -> Any:
        apps.append(create_app(*args, **options))
        return apps[-1]

    return create


def conversation(pin: Any, turns: int = 1, *, before: str = "You keep notes.") -> Messages:
    """A pinned plan between instructions and so many questions."""
    plan: dict[str, Any] = {"role": "user", "content": PLAN}
    if pin is not None:
        plan["leyline"] = {"pin": pin}
    talk: Messages = [{"role": "system", "content": before}, plan]
    for number in range(turns):
        talk += [
            {"role": "user", "content": f"Question {number}?"},
            {"role": "assistant", "content": "AB"},
        ]
    return talk[:-1]


async def test_a_pinned_message_is_claimed_softly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own tokens in the turn that was just retained, for an hour, ahead of unclaimed ones."""
    engine = ClaimsEngine()
    async with talking(engine, monkeypatch) as talk:
        account = await talk.turn(conversation(True))
    (claim,) = [status.claim for status in engine.live()]
    assert (claim.kind, claim.priority, claim.ttl_s) == (ClaimKind.SOFT, 50, 3600)
    assert (claim.session, claim.predicate.source) == ("s", account["turn"])
    span = claim.predicate.start, claim.predicate.end
    assert PLAN in text_of(conversation(None), *span)
    assert "Question" not in text_of(conversation(None), *span)
    assert account["refused_verbs"] == []


async def test_a_pin_can_have_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kind, priority and time are the caller's to choose; other terms are a later revision."""
    engine = ClaimsEngine()
    async with talking(engine, monkeypatch) as talk:
        await talk.turn(conversation({"kind": "hard", "priority": 7, "ttl_s": 60}))
        (first,) = [status.claim for status in engine.live()]
        await talk.turn(conversation({}, 2))
        (second,) = [status.claim for status in engine.live()]
    assert (first.kind, first.priority, first.ttl_s) == (ClaimKind.HARD, 7, 60)
    assert (second.id, second.revision) == (first.id, 2)
    assert (second.kind, second.ttl_s) == (ClaimKind.SOFT, 3600)


async def test_a_pin_is_renewed_when_half_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Turns before that ask nothing of the engine."""
    engine = ClaimsEngine()
    async with talking(engine, monkeypatch) as talk:
        for number in range(1, 5):
            await talk.turn(conversation(True, number))
        once = engine.submitted()
        talk.clock.now += 1801
        await talk.turn(conversation(True, 5))
        await talk.turn(conversation(True, 6))
    assert [claim.revision for claim in once] == [1]
    assert [claim.revision for claim in engine.submitted()] == [1, 2]
    assert len({claim.id for claim in engine.submitted()}) == 1


async def test_a_pin_follows_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change before it gives it another place, which a later revision claims; so does a text of
    equal length, because the KV after it is different."""
    engine = ClaimsEngine()
    async with talking(engine, monkeypatch) as talk:
        await talk.turn(conversation(True, 1))
        await talk.turn(conversation(True, 2, before="You keep very long notes."))
        account = await talk.turn(conversation(True, 3, before="You keep very tiny notes."))
    claims = engine.submitted()
    assert [claim.revision for claim in claims] == [1, 2, 3]
    assert claims[0].predicate.start < claims[1].predicate.start == claims[2].predicate.start
    assert engine.live()[0].claim.predicate.source == account["turn"]


@pytest.mark.parametrize("gone", ["message", "annotation"])
async def test_what_is_pinned_no_more_is_released(
    gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim ends with the turn that says so."""
    engine = ClaimsEngine()
    left = conversation(None, 2)
    if gone == "message":
        del left[1]
    async with talking(engine, monkeypatch) as talk:
        await talk.turn(conversation(True))
        await talk.turn(left)
        await talk.turn([*left, {"role": "user", "content": "And on."}])
    released = [command for command in engine.commands if isinstance(command, ReleaseClaim)]
    assert not engine.live()
    assert len(released) == 1, "once is enough"


async def test_a_refused_pin_is_told_with_the_next_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reported by message, with the limit; it is tried again after a while and no longer
    reported."""
    engine = ClaimsEngine(claims=1)
    pinned = conversation(True)
    pinned[0]["leyline"] = {"pin": True}
    async with talking(engine, monkeypatch) as talk:
        first = await talk.turn(pinned)
        more = [*pinned, {"role": "assistant", "content": "AB"}, {"role": "user", "content": "?"}]
        second = await talk.turn(more)
        tried = len(engine.submitted())
        engine.book.release("default", engine.live()[0].claim.id)
        talk.clock.now += RETRY_S
        await talk.turn(more)
        last = await talk.turn(more)
    assert first["refused_verbs"] == []
    (refused,) = second["refused_verbs"]
    assert (refused["message"], refused["verb"]) == (1, "pin")
    assert refused["reason"].startswith("claim_limit: ")
    assert tried == 2, "a refused pin isn't sent on each turn"
    assert [item["message"] for item in last["refused_verbs"]] == []


async def test_a_pin_that_gave_way_is_claimed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A soft claim may be evicted; the next turn has its KV again and says so again."""
    engine = ClaimsEngine()
    async with talking(engine, monkeypatch, claims_interval_s=0.02) as talk:
        await talk.turn(conversation(True))
        (claim,) = engine.submitted()
        engine.book.release("default", claim.id)
        for _ in range(500):
            if not talk.claims.at("engine").lives("default", claim.id):
                break
            await asyncio.sleep(0.01)
        await talk.turn(conversation(True, 2))
    assert [status.claim.revision for status in engine.live()] == [2]


async def test_a_policy_can_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy's word on a message counts as much as the caller's."""

    class PinsPlans:
        name, mode = "pins_plans", "amortize"

        def transform(self, messages: Messages, turn_idx: int) -> Messages:
            return [pin(m, priority=7) if m["content"] == PLAN else m for m in messages]

    engine = ClaimsEngine()
    async with talking(engine, monkeypatch) as talk:

        async def planned(*_: object) -> object:
            return (PinsPlans(),), EXACT

        monkeypatch.setattr("leyline_proxy.turns.opener.effective_rules", planned)
        await talk.turn(conversation(None))
    assert [claim.priority for claim in engine.submitted()] == [7]


async def test_a_revision_that_another_proxy_made_is_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pin is renewed after the latest one."""
    engine = ClaimsEngine()
    async with talking(engine, monkeypatch) as talk:
        account = await talk.turn(conversation(True))
        (claim,) = engine.submitted()
        theirs = msgspec.structs.replace(claim, revision=7)
        engine.book.submit(theirs, engine.sources[account["turn"]])
        talk.clock.now += 1801
        await talk.turn(conversation(True, 2))
    assert [claim.revision for claim in engine.submitted()] == [1, 2, 8]
    assert engine.live()[0].claim.revision == 8


async def test_the_newest_turns_word_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns that come while the engine is slow at claims don't wait for it, nor for each other."""
    engine = ClaimsEngine()
    async with talking(engine, monkeypatch) as talk:
        engine.open.clear()
        await talk.turn(conversation(True), waits=False)
        await talk.turn(conversation({"priority": 9}, 2), waits=False)
        await talk.turn(conversation({"priority": 8}, 3), waits=False)
        engine.open.set()
        await talk.turn(conversation({"priority": 8}, 4))
    assert [claim.priority for claim in engine.submitted()] == [50, 8]


async def test_an_engine_that_fails_at_claims_serves_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers don't wait for pins, and the first turn after the fault pins."""
    engine = ClaimsEngine()
    async with talking(engine, monkeypatch) as talk:
        engine.failing = True
        await talk.turn(conversation(True))
        engine.failing = False
        await talk.turn(conversation(True, 2))
    assert [claim.revision for claim in engine.submitted()] == [1]
    assert len(engine.live()) == 1


async def test_pins_of_sessions_are_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same conversation in two sessions has two claims; one that ends leaves the other."""
    engine = ClaimsEngine()
    async with talking(engine, monkeypatch) as talk:
        await talk.turn(conversation(True), "s")
        await talk.turn(conversation(True), "t")
        await talk.turn(conversation(None, 2), "s")
    assert [status.claim.session for status in engine.live()] == ["t"]


async def test_an_unreadable_pin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms out of bounds are a 400 that names message and member."""
    engine = ClaimsEngine()
    async with talking(engine, monkeypatch) as talk:
        for pin, param in (
            ({"kind": "firm"}, "messages[1].leyline.pin.kind"),
            ({"priority": 101}, "messages[1].leyline.pin.priority"),
            ({"ttl_s": 0}, "messages[1].leyline.pin.ttl_s"),
            ({"for": 3}, "messages[1].leyline.pin"),
        ):
            answer = await talk._client.post(
                "/v1/chat/completions", json={"model": MODEL, "messages": conversation(pin)}
            )
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param)
