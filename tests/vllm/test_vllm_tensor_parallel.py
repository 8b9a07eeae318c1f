"""Two tensor-parallel ranks splice what one does, and what the contract says."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from contract_kit import (
    BOUND,
    CONTROL_FACTOR,
    Played,
    PlayedSession,
    distance,
    draw_tokens,
    expect,
    load_reference,
)
from oracle_models import OracleModel
from oracle_reference import Fresh
from splice_kit import splicing_engine

from leyline_engine.contract import Directive, EditPayload, Outcome


class SessionOfRanks(PlayedSession):
    """A session whose engine's rows are in other processes; only answers are compared."""

    def _run(self, prompt: Sequence[int], pieces: Sequence[Any], **members: Any) -> Played:
        name = f"t{len(self.turns)}"
        payload = EditPayload(session=self.session, scope=self.scope, turn=name, **members)
        answer = self.engine.ask(prompt, payload, decode=self.decode, scores=20)
        assert answer.record is not None
        expected = expect(self.subject, pieces, answer)
        played = Played(name, answer, answer.record.receipt, tuple(pieces), expected, ([], []))
        self.turns.append(played)
        return played


def play(folder: Path, subject: OracleModel, ranks: int) -> list[Played]:
    """A session that edits its last turn again and again, on an engine of so many ranks."""
    rng = random.Random(7)
    with splicing_engine(folder, tensor_parallel_size=ranks) as engine:
        session = SessionOfRanks(engine, subject)
        turn = session.open(draw_tokens(rng, 700))
        for start in (70, 133, 260):
            cuts = (
                Directive(start, start + 11, draw_tokens(rng, 5)),
                Directive(start + 200, start + 230, ()),
            )
            turn = session.edit(turn, cuts, draw_tokens(rng, 20))
        return session.turns


@pytest.mark.nightly
def test_two_ranks_answer_as_one_and_as_the_contract(vllm_model: Path) -> None:
    """Tokens, receipts and log-probabilities: the same with a rank per key-value head."""
    subject = load_reference(vllm_model)
    one, two = play(vllm_model, subject, 1), play(vllm_model, subject, 2)
    for alone, both in zip(one, two, strict=True):
        assert both.answer.tokens == alone.answer.tokens
        assert both.receipt.tokens == alone.receipt.tokens
        assert max(alone.error, both.error) <= BOUND
    for turn in two[1:]:
        assert turn.receipt.outcome is Outcome.SPLICED
        exact = expect(subject, [Fresh(turn.answer.prompt)], turn.answer)
        assert distance(turn.answer, exact) > CONTROL_FACTOR * BOUND
