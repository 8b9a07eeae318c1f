"""Claims on vLLM: what they hold, what gives way to them, and the requests that they refuse."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from contract_kit import draw_tokens
from splice_kit import Answer, SplicingEngine, splicing_engine

from leyline_engine.contract import (
    Claim,
    ClaimKind,
    ClaimReply,
    ClaimState,
    EditPayload,
    GetClaim,
    Predicate,
    ReleaseClaim,
    SubmitClaim,
)
from leyline_engine.server.claim_clock import ClaimAnswer, ClaimMessage

BLOCKS = 64
BLOCK = 32


class Claimant:
    """A client of one engine's claims, with the clock of its messages."""

    def __init__(self, engine: SplicingEngine) -> None:
        self.engine = engine
        self.now_ms = 0
        self._orders = count(1)

    def send(self, command: Any = None) -> ClaimReply:
        """Carry out a command, or let the time come."""
        text = "" if command is None else msgspec.json.encode(command).decode()
        message = ClaimMessage(next(self._orders), self.now_ms, text)
        answer = self.engine.leyline.control(msgspec.json.encode(message).decode())
        return msgspec.json.decode(answer, type=ClaimAnswer).reply

    def claim(self, session: str, end: int, **terms: Any) -> ClaimState:
        """Claim the beginning of a session's turn ``a``, hard unless ``terms`` say otherwise."""
        given = {"id": session, "tenant": "t", "kind": ClaimKind.HARD, "session": session}
        reply = self.send(SubmitClaim(Claim(predicate=Predicate("a", 0, end), **(given | terms))))
        assert reply.problem is None, reply.problem
        return reply.claims[0].state

    def state(self, session: str) -> ClaimState:
        """The state of a claim."""
        return self.send(GetClaim("t", session)).claims[0].state

    def release(self, session: str) -> None:
        """Release a claim."""
        assert self.send(ReleaseClaim("t", session)).problem is None

    def opened(self, session: str, seed: int, length: int = 300) -> Answer:
        """A session's first turn."""
        prompt = draw_tokens(random.Random(seed), length)
        return self.engine.ask(prompt, EditPayload(session=session, scope="t", turn="a"))

    def press(self, seed: int = 99) -> None:
        """Run requests of nobody that need more blocks than there are."""
        rng = random.Random(seed)
        for _ in range(8):
            self.engine.ask(draw_tokens(rng, 300))

    def cached(self, answer: Answer) -> int:
        """The number of tokens of a prompt that are found again."""
        return self.engine.ask(answer.prompt, decode=1).cached


@pytest.fixture
def claimant(vllm_model: Path) -> Iterator[Claimant]:
    """Claims on an engine of few blocks; in the end, none of them is held."""
    with splicing_engine(vllm_model, num_gpu_blocks_override=BLOCKS, max_model_len=2000) as engine:
        yield Claimant(engine)
        engine.settle()
        assert not engine.leyline.claims.shelf.held
        assert engine.leyline.cache.free == BLOCKS - 1


def test_a_lock_survives_pressure_until_it_is_released(claimant: Claimant) -> None:
    """A hard claim keeps its tokens cached; without it, they go like all others."""
    claimed, control = claimant.opened("s", 1), claimant.opened("other", 2)
    assert claimant.claim("s", 288) is ClaimState.MATERIALIZED
    claimant.press()
    assert claimant.cached(control) == 0, "control: there was no pressure"
    assert claimant.cached(claimed) == 288
    claimant.release("s")
    claimant.press(98)
    assert claimant.cached(claimed) == 0


def test_ranked_blocks_go_after_all_others_in_order_of_rank(claimant: Claimant) -> None:
    """Of three texts used one after another, the oldest stays longest if it ranks highest."""
    first, second = claimant.opened("first", 1), claimant.opened("second", 2)
    last = claimant.opened("last", 3)
    soft = {"kind": ClaimKind.SOFT}
    assert claimant.claim("first", 288, priority=9, **soft) is ClaimState.MATERIALIZED
    assert claimant.claim("second", 288, priority=2, **soft) is ClaimState.MATERIALIZED
    rng = random.Random(7)
    for _ in range(4):
        claimant.engine.ask(draw_tokens(rng, 300))
    assert claimant.state("first") is claimant.state("second") is ClaimState.MATERIALIZED
    claimant.engine.ask(draw_tokens(rng, 1600))
    assert claimant.state("second") is ClaimState.EVICTED
    assert claimant.state("first") is ClaimState.MATERIALIZED
    assert (claimant.cached(first), claimant.cached(last)) == (288, 0)
    assert claimant.cached(second) < 288
    claimant.release("first")


def test_a_request_that_never_fits_beside_a_claim_ends_at_once(claimant: Claimant) -> None:
    """It isn't queued, its receipt names the claim, and it runs after the release."""
    claimant.opened("s", 1)
    assert claimant.claim("s", 288) is ClaimState.MATERIALIZED
    prompt = draw_tokens(random.Random(5), 1700)
    big = EditPayload(session="big", scope="t", turn="a")
    (refused,) = claimant.engine.run([claimant.engine.start(prompt, big, decode=100)])
    assert refused.record is not None and refused.record.receipt.refused is not None
    assert refused.record.receipt.refused.own == ("s",)
    assert not refused.output
    claimant.release("s")
    assert len(claimant.engine.ask(prompt, big, decode=100).output) == 100
