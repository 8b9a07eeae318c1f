"""The oracle itself, checked where the truth is known without it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from oracle_cases import draw_case, draw_tokens
from oracle_check import BOUND, CONTROL_FACTOR, relative_error
from oracle_engine import edited_prompt
from oracle_models import MODEL_NAMES, OracleModel, build_model
from oracle_reference import SINK, Fresh, Keep, amortized_pieces, long_way_round

from leyline_engine.contract import ATTENTION_SINK

Models = Callable[[str], OracleModel]


def plain_logits(subject: OracleModel, tokens: list[int], count: int) -> list[torch.Tensor]:
    """Logits of the last ``count`` positions in one forward without a cache."""
    with torch.inference_mode():
        output = subject.model(input_ids=torch.tensor([tokens]), use_cache=False)
    return list(output.logits[0, -count:].float())


def test_the_sink_is_the_contracts() -> None:
    """The oracle's own figure is the one that the contract publishes."""
    assert SINK == ATTENTION_SINK


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_keeping_an_unmoved_turn_changes_nothing(name: str, oracle_model: Models) -> None:
    """Tokens kept where they were give the logits of one plain forward."""
    rng = random.Random(7)
    subject = oracle_model(name)
    first, more, forced = draw_tokens(rng, 200), draw_tokens(rng, 20), draw_tokens(rng, 4)
    source = long_way_round(subject, [Fresh(first)], ()).turn
    got = long_way_round(subject, [Keep(source, 0, 200), Fresh(more)], forced)
    assert got.reused == tuple(range(32, 200))
    expected = plain_logits(subject, [*first, *more, *forced], 5)
    assert relative_error(got.logits, expected) <= BOUND


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_in_one_layer_amortize_is_a_new_prefill(name: str) -> None:
    """With one layer, keys and values depend on their own token only, so both must agree."""
    subject = build_model(name, layers=1)
    for seed in range(3):
        case = draw_case(seed, min_edits=2, max_turns=1)
        turn = case.turns[0]
        source = long_way_round(subject, [Fresh(case.opening)], case.opening_answer.fed, 1).turn
        pieces = amortized_pieces(source, turn.edits, turn.tail)
        got = long_way_round(subject, pieces, turn.answer.fed)
        prompt = edited_prompt(source.tokens, turn.edits, turn.tail)
        expected = plain_logits(subject, [*prompt, *turn.answer.fed], 1 + len(turn.answer.fed))
        assert got.reused
        assert relative_error(got.logits, expected) <= BOUND


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_in_three_layers_amortize_is_no_new_prefill(name: str, oracle_model: Models) -> None:
    """With several layers the kept tokens remember the cut span, and the logits show it."""
    rng = random.Random(11)
    subject = oracle_model(name)
    first, tail = draw_tokens(rng, 250), draw_tokens(rng, 5)
    source = long_way_round(subject, [Fresh(first)], ()).turn
    edits = ((60, 140, ()),)
    got = long_way_round(subject, amortized_pieces(source, edits, tail), ())
    expected = plain_logits(subject, edited_prompt(first, edits, tail), 1)
    assert relative_error(got.logits, expected) >= CONTROL_FACTOR * BOUND
