"""Two tensor-parallel ranks splice what one does and what the contract says, and forget alike."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
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
from forget_story import SECRET, Story, asked
from oracle_models import OracleModel
from oracle_reference import Fresh
from secret_rows import first_values
from splice_kit import SplicingEngine, splicing_engine

from leyline_engine.contract import (
    Directive,
    EditPayload,
    Outcome,
    SpanLabel,
    apply_directives,
)


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


def rows_near(worker: Any, wanted: list[torch.Tensor], block: int, capacity: int) -> list[bool]:
    """Find values in the first layer of a rank's pool; runs in the rank's process.

    Args:
        wanted: by rank, values ``[n, heads * dim]``.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from leyline_engine.rows.paging import by_slot

    tensors = get_kv_transfer_group().rows.pool.tensors
    every = torch.arange(block, block + capacity)
    rows = by_slot(tensors.values[0], tensors.value_paging)[every].flatten(1)
    mine = wanted[worker.rank]
    nearest = torch.cdist(mine, rows).min(dim=1).values / mine.norm(dim=1)
    return [bool(error < 1e-3) for error in nearest]


def held_by_rank(
    engine: SplicingEngine, subject: OracleModel, tokens: Sequence[int]
) -> list[set[int]]:
    """By rank, the tokens among these that have a row in its pool, free blocks included."""
    values = first_values(subject, tokens)
    cache = engine.leyline.cache
    parts = [part.contiguous() for part in values.chunk(2, dim=1)]
    found = engine.llm.collective_rpc(rows_near, args=(parts, cache.block, cache.capacity))
    return [{t for t, near in zip(tokens, rank, strict=True) if near} for rank in found]


@pytest.mark.nightly
def test_a_forget_overwrites_the_rows_of_every_rank(vllm_model: Path) -> None:
    """Each rank has half of every row, and no half of the secret is left, spliced or not."""
    subject = load_reference(vllm_model)
    with splicing_engine(vllm_model, tensor_parallel_size=2) as engine:
        story = Story(engine)
        told = story.tell()
        cut = (Directive(20, 30, ()),)
        spliced = asked(
            engine,
            (*apply_directives(told.tokens, cut), 77),
            EditPayload(
                session=story.session,
                scope="t",
                turn="t2",
                sources=(told.ref("t1"),),
                directives=cut,
                spans=(SpanLabel("head", 0, 90), SpanLabel("secret", 90, 130)),
            ),
        )
        assert spliced.record is not None
        assert spliced.record.receipt.outcome is Outcome.SPLICED
        assert held_by_rank(engine, subject, story.secret) == [set(story.secret)] * 2
        counts = story.forget()
        assert counts.overwritten > 2 * SECRET and counts.pending == 0
        assert held_by_rank(engine, subject, story.secret) == [set(), set()]
