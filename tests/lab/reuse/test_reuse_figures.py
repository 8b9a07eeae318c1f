"""The figures of ``leyline bench reuse``: sums, medians, and measures that are missing."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from leyline_lab.reuse.figures import Closeness, Sample, pattern_json
from leyline_lab.reuse.replay_engine import compare as compare_logits
from leyline_lab.reuse.report import print_patterns
from leyline_lab.reuse.sglang import compare as compare_steps

SAMPLES = [
    Sample(100, 0, 0, 0, {"cdc": 0}, live_ms=90, radix_ms=1, live=Closeness((0.0,), (True,))),
    Sample(100, 20, 49, 50, {"cdc": 5}, 40, 3, 6, Closeness((0.5,), (False,))),
    Sample(200, 20, 98, 100, {"cdc": 5}, 60, 5, 10, Closeness((0.1,), (True,))),
]


def test_shares_are_of_all_prompt_tokens() -> None:
    """Tokens are added up before they are divided; the first request's time doesn't count."""
    figures = pattern_json(SAMPLES)
    assert (figures["prefix"], figures["additional"], figures["total"]) == (0.1, 0.3675, 0.4675)
    assert (figures["recoverable"], figures["goal_met"]) == (0.375, True)
    assert figures["ttft_ratio_to_radix"] == 0.5
    assert figures["kl"] == pytest.approx(0.2)
    assert (figures["argmax_match"], figures["first_divergence"]) == (0.666667, 0.6667)
    assert figures["arms"]["radix"]["prefix"] == 0.25
    assert figures["arms"]["cdc"]["additional"] == 0.025


def test_one_token_less_misses_the_goal() -> None:
    """The goal is 98 of 100 recoverable tokens, prefix or not."""
    short = [*SAMPLES[:2], replace(SAMPLES[2], reused=97)]
    assert pattern_json(short)["goal_met"] is False


def test_a_missing_measure_is_null_and_said() -> None:
    """Neither zero nor a guess: the table names it, and gives no verdict."""
    bare = [
        replace(sample, recoverable=None, arms={}, live=None, live_ms=None) for sample in SAMPLES
    ]
    figures = pattern_json(bare)
    missing = ("recoverable", "goal_met", "kl", "argmax_match", "ttft_ratio_to_radix")
    assert all(figures[name] is None for name in missing)
    assert "cdc" not in figures["arms"]
    text = io.StringIO()
    print_patterns(Console(file=text, width=80), {"patterns": {"clock": figures}}, "title")
    assert "not measured (null): recoverable," in text.getvalue()
    assert ": met" not in text.getvalue() and "MISSED" not in text.getvalue()


def test_both_engines_divergence_is_kls() -> None:
    """The same two distributions, as logits and as log probabilities, give KL(full || other)."""
    full, other = [0.7, 0.2, 0.1], [0.3, 0.6, 0.1]
    expected = sum(p * math.log(p / q) for p, q in zip(full, other, strict=True))
    logits = [torch.tensor([row]).log() + 5 for row in (full, other)]
    steps = [[{id_: math.log(p) for id_, p in enumerate(row)}] for row in (full, other)]
    for found in (compare_logits(*logits), compare_steps(*steps)):
        assert found.kl == (pytest.approx(expected, abs=1e-6),)
        assert found.equal == (False,)
        assert found.first_divergence == 0
    assert compare_steps(steps[0], steps[0]).kl == (0.0,)
