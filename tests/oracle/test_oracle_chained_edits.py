"""Fifty edits, one upon the other, in logits: flat, where naive chaining drifts.

Each turn edits the one before near its start, so that nearly all of it is spliced again. The same
over a thousand splices, without a model, is tested at the pool.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import mean

import pytest
import torch
from oracle_cases import draw_tokens
from oracle_check import BOUND, relative_error, spliced_by_contract
from oracle_engine import Conversation, chain_naively, start_engine
from oracle_models import OracleModel, build_model
from oracle_reference import Fresh, amortized_pieces, long_way_round

Models = Callable[[str], OracleModel]

CHAIN = 50
ENDS = 10
"""Turns over which the error is averaged, at either end of the chain."""
NAMES = ("llama", "deepseek-v2-yarn", pytest.param("deepseek-v3", marks=pytest.mark.nightly))


def chained_errors(subject: OracleModel, *, naive: bool = False) -> list[float]:
    """The error of each edited turn; every edit splices what the last one spliced."""
    rng = random.Random(20)
    conversation = Conversation(start_engine(subject))
    if naive:
        chain_naively(conversation.engine)
    opening = draw_tokens(rng, 240)
    conversation.open(opening, (1, 2), 3)
    truth = long_way_round(subject, [Fresh(opening)], (1, 2), 3)
    errors: list[float] = []
    for _ in range(CHAIN):
        edit = (40, 40 + rng.choice([3, 11]), draw_tokens(rng, rng.choice([1, 13])))
        source, tail = truth.turn, draw_tokens(rng, 1)
        ran = conversation.edit([edit], tail, (1, 2), 3)
        truth = long_way_round(subject, amortized_pieces(source, [edit], tail), (1, 2), 3)
        assert ran.receipt.tokens.spliced == spliced_by_contract(truth, 40) > 100
        errors.append(relative_error(ran.logits, truth.logits))
    return errors


@pytest.mark.parametrize("name", NAMES)
def test_fifty_chained_edits_stay_flat(name: str, oracle_model: Models) -> None:
    """In fp32 every turn keeps the bound, and the last ones are no worse than the first."""
    errors = chained_errors(oracle_model(name))
    assert max(errors) <= BOUND
    assert mean(errors[-ENDS:]) <= 1.25 * mean(errors[:ENDS])


@pytest.mark.parametrize("name", NAMES)
def test_fifty_naively_chained_edits_drift(name: str, oracle_model: Models) -> None:
    """Control: with the rounded key turned again and again, the error grows with the chain."""
    flat, drifting = (chained_errors(oracle_model(name), naive=naive) for naive in (False, True))
    assert mean(drifting[-ENDS:]) >= 1.3 * mean(drifting[:ENDS])
    assert mean(drifting[-ENDS:]) >= 1.3 * mean(flat[-ENDS:])


@pytest.mark.parametrize("name", NAMES)
def test_fifty_chained_edits_stay_flat_in_bf16(name: str) -> None:
    """If a single rounding is worth a percent, fifty splices still cost no more than a few."""
    subject = OracleModel(name, build_model(name).model.to(torch.bfloat16))
    errors = chained_errors(subject)
    assert mean(errors[-ENDS:]) <= 1.5 * mean(errors[:ENDS])
