"""A recalled run against its contract computed the long way round: a session's own evicted text."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence

import pytest
import torch
from oracle_cases import draw_tokens
from oracle_check import BOUND, relative_error
from oracle_engine import Ran, start_engine, tamper
from oracle_models import MODEL_NAMES, OracleModel
from oracle_reference import Fresh, Keep, Piece, long_way_round

from leyline_engine.contract import EditPayload, ReuseMode, ReusePayload
from leyline_replay.engine import GenerationRequest, ReplayEngine

Models = Callable[[str], OracleModel]

FORCED = (1, 2, 3)
INDEX = ReusePayload(mode=ReuseMode.LIVE, within=())


def run(engine: ReplayEngine, turn: str, prompt: Sequence[int], reuse: ReusePayload) -> Ran:
    """One turn of the session."""
    payload = EditPayload(session="s", scope="tenant", turn=turn)
    sequence = engine.admit(GenerationRequest(turn, array("q", prompt), payload, reuse))
    logits = None
    while logits is None:
        logits = sequence.prefill_step()
    answers: list[torch.Tensor] = [logits, *(sequence.decode_step(token) for token in FORCED)]
    record = sequence.finish()
    engine.check_integrity()
    return Ran(turn, (*prompt, *record.output_ids), tuple(answers), record.receipt)


class Scene:
    """A session whose first turn has a text and a note, whose second has neither, and whose third
    has both again, at other places. Only a part of the text is recalled."""

    def __init__(self, subject: OracleModel, change: str = "") -> None:
        rng = random.Random(61)
        self.subject = subject
        engine = start_engine(subject, chunk_tokens=64)
        text, note = draw_tokens(rng, 130), draw_tokens(rng, 90)
        head, other, tail = (draw_tokens(rng, length) for length in (50, 71, 6))
        first = [*head, 3, *text, 7, *note, 8]
        run(engine, "t1", first, INDEX)
        run(engine, "t2", [*head, 3, 9, *tail], INDEX)
        if change:
            tamper(engine, change, subject)
        start = len(other) + 1
        recalled = (start + 10, start + 110)
        third = [*other, 4, *text, 11, *note, 12, *tail]
        asked = ReusePayload(mode=ReuseMode.LIVE, within=(recalled,), own=True)
        self.ran = run(engine, "t3", third, asked)
        self.recalled = recalled
        before = long_way_round(subject, [Fresh(tuple(first))], FORCED).turn
        pieces: list[Piece] = [
            Fresh(tuple(third[: recalled[0]])),
            Keep(before, 51 + 10, 51 + 110),
            Fresh(tuple(third[recalled[1] :])),
        ]
        self.truth = long_way_round(subject, pieces, FORCED).logits


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_a_recalled_run_gives_the_contracts_logits(name: str, oracle_model: Models) -> None:
    """The recalled part is the first turn's KV at new positions; all the rest is computed."""
    scene = Scene(oracle_model(name))
    counts = scene.ran.receipt.reuse
    assert counts is not None
    assert (counts.total, counts.session, counts.extents) == (100, 100, (scene.recalled,))
    assert relative_error(scene.ran.logits, scene.truth) <= BOUND


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3"])
def test_a_recalled_run_that_is_not_rotated_would_be_seen(name: str, oracle_model: Models) -> None:
    """Control: keys that keep the first turn's positions miss the contract's logits by far."""
    scene = Scene(oracle_model(name), "no_rotation")
    assert scene.ran.receipt.tokens.reused == 100
    assert relative_error(scene.ran.logits, scene.truth) > 10 * BOUND
