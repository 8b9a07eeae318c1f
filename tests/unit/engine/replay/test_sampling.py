"""Sampling: greedy, restricted, biased, penalised, seeded."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leyline_replay.text.sampling import Sampler, SamplingParams

LOGITS = torch.tensor([0.0, 3.0, 2.0, -1.0, 2.9])


def draw(params: SamplingParams, count: int = 50, logits: torch.Tensor = LOGITS) -> list[int]:
    """Tokens drawn from the same logits."""
    sampler = Sampler(params)
    return [sampler.sample(logits).token for _ in range(count)]


def test_greedy_takes_the_most_likely() -> None:
    """Temperature 0 takes the maximum, and leaves the logits as they were."""
    before = LOGITS.clone()
    assert draw(SamplingParams(temperature=0), 3) == [1, 1, 1]
    assert torch.equal(LOGITS, before)


def test_seed_makes_draws_repeatable() -> None:
    """Equal seeds give equal tokens, other seeds other ones."""
    first = draw(SamplingParams(seed=7))
    assert first == draw(SamplingParams(seed=7))
    assert first != draw(SamplingParams(seed=8))
    assert draw(SamplingParams(seed=-1))


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(top_k=2, temperature=2), {1, 4}),
        (SamplingParams(top_p=0.4, temperature=1), {1}),
        (SamplingParams(top_p=0.0, temperature=2), {1}),
        (SamplingParams(top_p=0.6, temperature=1), {1, 4}),
        (SamplingParams(top_k=1), {1}),
        (SamplingParams(temperature=1e-30), {1}),
    ],
)
def test_restrictions_leave_exactly_the_likely_tokens(
    params: SamplingParams, allowed: set[int]
) -> None:
    """top_k and top_p draw from the most likely tokens and from nothing else."""
    assert set(draw(params, 200)) == allowed


def test_bias_and_penalties_change_the_choice() -> None:
    """A bias bans or forces a token; penalties push a repeated token away."""
    assert draw(SamplingParams(temperature=0, logit_bias={1: -100.0}), 1) == [4]
    assert draw(SamplingParams(temperature=0, logit_bias={3: 100.0}), 1) == [3]
    assert draw(SamplingParams(temperature=0, presence_penalty=2.0), 3) == [1, 4, 2]
    assert draw(SamplingParams(temperature=0, frequency_penalty=0.3), 4) == [1, 4, 1, 4]


@given(st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=40), st.integers(0, 20))
def test_logprobs_describe_the_distribution(values: list[float], top: int) -> None:
    """The chosen token's and the top tokens' logprobs are the log softmax of the logits."""
    logits = torch.tensor(values)
    sampled = Sampler(SamplingParams(seed=1, top_logprobs=top)).sample(logits)
    expected = torch.log_softmax(logits.double(), -1).tolist()
    assert sampled.logprob is not None
    assert math.isclose(sampled.logprob, expected[sampled.token], abs_tol=1e-4)
    assert len(sampled.top) == min(top, len(values))
    listed = [entry.logprob for entry in sampled.top]
    assert listed == sorted(listed, reverse=True)
    for entry in sampled.top:
        assert math.isclose(entry.logprob, expected[entry.token], abs_tol=1e-4)


def test_draws_follow_the_probabilities() -> None:
    """Frequencies of many draws come near the softmax."""
    drawn = draw(SamplingParams(seed=3), 4000)
    expected = torch.softmax(LOGITS, -1).tolist()
    for token, probability in enumerate(expected):
        assert abs(drawn.count(token) / 4000 - probability) < 0.03
