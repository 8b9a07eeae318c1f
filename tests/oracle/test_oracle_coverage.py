"""The coverage of the random cases: the claim is counted, so that it can't rot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from oracle_cases import (
    NIGHTLY_BLOCKS,
    TRAITS,
    ci_seeds,
    draw_case,
    nightly_seeds,
    traits,
)
from oracle_engine import start_engine
from oracle_models import MODEL_NAMES, OracleModel

Models = Callable[[str], OracleModel]

MODEL_TRAITS = frozenset(
    {"MLA", "GQA", "interleaved", "half-split", "default", "linear", "llama3", "yarn", "partial"}
)


def model_traits(subject: OracleModel) -> set[str]:
    """The engine's measurements on a model."""
    engine = start_engine(subject)
    layout, rotary = engine.cache.pool.layout, engine.capability.rotary
    assert rotary is not None
    width = layout.shapes[0][layout.rotary_tensor][1]
    partial = {"partial"} if layout.pool_class == "gqa" and layout.rotary_dim < width else set()
    pool_class = {"mla_latent": "MLA", "gqa": "GQA"}[layout.pool_class]
    return {pool_class, rotary.pairing.replace("_", "-"), rotary.rope_type, *partial}


def test_a_run_plays_five_hundred_cases_and_a_night_ten_thousand() -> None:
    """Counted in distinct seeds; none is played twice, and no night repeats what CI plays."""
    in_ci = [seed for name in MODEL_NAMES for seed in ci_seeds(name)]
    by_night = [
        seed
        for name in MODEL_NAMES
        for block in range(NIGHTLY_BLOCKS)
        for seed in nightly_seeds(name, block)
    ]
    assert len(in_ci) >= 500
    assert len(by_night) >= 10_000
    assert len({*in_ci, *by_night}) == len(in_ci) + len(by_night)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_the_cases_of_each_model_exercise_everything(name: str) -> None:
    """On every architecture: one to eight edits, each kind, both signs, both ends, mixed modes."""
    seen = Counter(trait for seed in ci_seeds(name) for trait in traits(draw_case(seed)))
    assert TRAITS - seen.keys() == set()
    assert seen.keys() <= TRAITS


def test_the_models_cover_every_pool_class_pairing_and_rotary_type(oracle_model: Models) -> None:
    """MLA and GQA, interleaved and half-split, each scaling that is supported, partial rotary."""
    covered = set().union(*(model_traits(oracle_model(name)) for name in MODEL_NAMES))
    assert covered >= MODEL_TRAITS
    by_model = [model_traits(oracle_model(name)) for name in MODEL_NAMES]
    for pool_class in ("MLA", "GQA"):
        pairings = set().union(*(found for found in by_model if pool_class in found))
        assert {"interleaved", "half-split"} <= pairings
