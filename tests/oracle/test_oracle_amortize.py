"""The engine's splices against the amortize contract computed the long way round."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from oracle_cases import (
    NIGHTLY_BLOCKS,
    ci_seeds,
    draw_case,
    draw_tokens,
    nightly_seeds,
    single_edit_case,
)
from oracle_check import BOUND, check_receipt, play, relative_error
from oracle_engine import Conversation, Edit, Treatment, start_engine
from oracle_models import MODEL_NAMES, OracleModel
from oracle_reference import Fresh, Keep, Piece, amortized_pieces, long_way_round

from leyline_engine.contract import CopySegment, LiteralSegment, Outcome

Models = Callable[[str], OracleModel]

FORCED = (1, 2, 3, 4)


def check_case(subject: OracleModel, seed: int) -> None:
    """Play one random conversation and check every turn of it."""
    opened, *edited = play(subject, draw_case(seed))
    assert opened.error <= BOUND
    for compared in edited:
        check_receipt(compared)
        assert compared.error <= BOUND, f"seed {seed}: {compared.error:.1e}"
    assert edited[0].receipt.tokens.spliced > 0


EVERY_COMMIT = ("llama", "stablelm-partial", "qwen3", "deepseek-v3", "glm-partial-interleaved")
"""A model of each kind of rotation: whole, partial, with normed heads, latent, interleaved."""


@pytest.mark.parametrize(
    "name",
    [
        name if name in EVERY_COMMIT else pytest.param(name, marks=pytest.mark.nightly)
        for name in MODEL_NAMES
    ],
)
def test_random_edits_give_the_contracts_logits(name: str, oracle_model: Models) -> None:
    """Random edits over one to three turns agree in logits and in every token count."""
    for seed in ci_seeds(name):
        check_case(oracle_model(name), seed)


@pytest.mark.nightly
@pytest.mark.parametrize("block", range(NIGHTLY_BLOCKS))
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_many_random_edits_give_the_contracts_logits(
    name: str, block: int, oracle_model: Models
) -> None:
    """The same over more than ten thousand other conversations."""
    for seed in nightly_seeds(name, block):
        check_case(oracle_model(name), seed)


@pytest.mark.parametrize("delta", [-180, -64, -1, 0, 1, 64, 180])
@pytest.mark.parametrize("name", ["qwen3", "deepseek-v2-yarn"])
def test_one_edit_moves_its_suffix_either_way(name: str, delta: int, oracle_model: Models) -> None:
    """A single edit splices all that follows it, whichever way and however far it moves."""
    _, edited = play(oracle_model(name), single_edit_case(5, delta))
    check_receipt(edited)
    # 302 tokens of the source have KV, and the last of the prompt lies in the tail.
    behind = 302 - 60 - (10 if delta == 0 else max(0, -delta))
    assert edited.receipt.tokens.spliced == behind
    assert edited.error <= BOUND


@pytest.mark.parametrize("boundary", [1, 16])
@pytest.mark.parametrize("name", ["stablelm-partial", "deepseek-v3-yarn"])
def test_literals_behind_an_edit_are_a_boundary(
    name: str, boundary: int, oracle_model: Models
) -> None:
    """Kept tokens that the segments call literals are computed again, those after them spliced."""
    case = single_edit_case(5, -64)
    (turn,) = case.turns
    case = replace(case, turns=(replace(turn, boundary=boundary),))
    _, edited = play(oracle_model(name), case)
    check_receipt(edited)
    assert edited.receipt.tokens.spliced == 302 - 60 - 64 - boundary
    assert edited.error <= BOUND


@pytest.mark.parametrize(
    ("edits", "spliced"),
    [
        ([(0, 20, ())], 304 - 20 - 32),
        ([(0, 0, (1, 2, 3))], 304 - 29),
        ([(10, 100, ())], 304 - 100 - 22),
        ([(2, 3, (7,)), (40, 50, (7,))], 304 - 50 + 8),
    ],
)
@pytest.mark.parametrize("name", ["stablelm-partial", "deepseek-v3"])
def test_positions_below_the_sink_are_computed_anew(
    name: str, edits: list[Edit], spliced: int, oracle_model: Models
) -> None:
    """Edits near the start: kept tokens that land below 32 are prefilled, the rest spliced."""
    rng = random.Random(50)
    subject = oracle_model(name)
    conversation = Conversation(start_engine(subject))
    opening = (500, 501, 502, *draw_tokens(rng, 297))
    conversation.open(opening, FORCED, 9)
    ran = conversation.edit(edits, (8, 8), FORCED)
    source = long_way_round(subject, [Fresh(opening)], FORCED, 9).turn
    truth = long_way_round(subject, amortized_pieces(source, edits, (8, 8)), FORCED)
    assert ran.receipt.tokens.prefix == edits[0][0]
    assert ran.receipt.tokens.spliced == spliced
    assert relative_error(ran.logits, truth.logits) <= BOUND


@pytest.mark.parametrize("name", ["stablelm-partial", "glm-partial-interleaved", "deepseek-v3"])
def test_a_prompt_draws_on_several_earlier_turns(name: str, oracle_model: Models) -> None:
    """Pieces of two unrelated turns, one of them spliced itself, make one prompt."""
    rng = random.Random(30)
    subject = oracle_model(name)
    conversation = Conversation(start_engine(subject, chunk_tokens=64))
    one, two = draw_tokens(rng, 200), draw_tokens(rng, 220)
    edit, new, tail = (50, 90, ()), draw_tokens(rng, 10), draw_tokens(rng, 3)
    ran_one = conversation.open(one, ())
    conversation.open(two, ())
    ran_two = conversation.edit([edit], tail, ())
    first = long_way_round(subject, [Fresh(one)], ()).turn
    second = long_way_round(subject, [Fresh(two)], ()).turn
    second = long_way_round(subject, amortized_pieces(second, [edit], tail), ()).turn

    ran = conversation.compose(
        [ran_one, ran_two],
        [
            CopySegment(0, 0, 150, 0),
            LiteralSegment(150, 10),
            CopySegment(1, 40, 140, 160),
            CopySegment(0, 170, 200, 260),
            LiteralSegment(290, 3),
        ],
        [*one[:150], *new, *second.tokens[40:140], *one[170:200], *tail],
        (1, 2),
    )
    pieces: list[Piece] = [
        Keep(first, 0, 150),
        Fresh(new),
        Keep(second, 40, 140),
        Keep(first, 170, 200),
        Fresh(tail),
    ]
    truth = long_way_round(subject, pieces, (1, 2))
    assert ran.receipt.outcome is Outcome.SPLICED
    assert (ran.receipt.tokens.prefix, ran.receipt.tokens.spliced) == (150, 130)
    assert relative_error(ran.logits, truth.logits) <= BOUND


@pytest.mark.parametrize("name", ["llama", "deepseek-v2"])
def test_an_edit_before_a_forgotten_span_is_still_spliced(name: str, oracle_model: Models) -> None:
    """Mixed modes: kept tokens are reused up to the forgotten span, and none after it."""
    rng = random.Random(40)
    subject = oracle_model(name)
    conversation = Conversation(start_engine(subject))
    opening, new, tail = draw_tokens(rng, 260), draw_tokens(rng, 6), draw_tokens(rng, 3)
    conversation.open(opening, (1, 2))
    ran = conversation.edit(
        [(60, 90, ()), (200, 210, new)],
        tail,
        (3, 4),
        treatments=[Treatment.AMORTIZE, Treatment.FORGET],
    )
    source = long_way_round(subject, [Fresh(opening)], (1, 2)).turn
    behind = source.tokens[210:]
    pieces: list[Piece] = [
        Keep(source, 0, 60),
        Keep(source, 90, 200),
        Fresh((*new, *behind, *tail)),
    ]
    truth = long_way_round(subject, pieces, (3, 4))
    assert (ran.receipt.tokens.prefix, ran.receipt.tokens.spliced) == (60, 110)
    assert relative_error(ran.logits, truth.logits) <= BOUND
