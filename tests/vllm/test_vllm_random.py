"""Random sessions against a real vLLM engine with too little memory.

Whatever the mix of appends, edits, forgets, plain requests, aborts, preemptions and failures: each
answer is that of the contract or of a clean run, receipts add up, forgotten text is in no slot once
its receipt is closed, and nothing is left behind.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from contract_kit import BLOCK, load_reference
from oracle_models import OracleModel
from random_sessions import Driver
from splice_kit import SplicingEngine, splicing_engine

SMALL = {
    "num_gpu_blocks_override": 28,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 4,
    "max_model_len": 640,
}
ENGINES = {
    "priority": {"scheduling_policy": "priority"},
    "fcfs": {"scheduling_policy": "fcfs"},
}


@pytest.fixture(
    scope="module",
    params=["priority", pytest.param("fcfs", marks=pytest.mark.nightly)],
)
def engine(request: pytest.FixtureRequest, vllm_model: Path) -> Iterator[SplicingEngine]:
    """An engine with Leyline, a small pool and small chunks."""
    with splicing_engine(vllm_model, **SMALL, **ENGINES[request.param]) as started:
        yield started


@pytest.fixture(scope="module")
def subject(vllm_model: Path) -> OracleModel:
    """The same model in transformers."""
    return load_reference(vllm_model)


def run(seed: int, engine: SplicingEngine, subject: OracleModel, steps: int) -> Driver:
    """Random steps, after which the engine is as it was."""
    policy = engine.scheduler.scheduler_config.policy
    driver = Driver(seed, engine, subject, priorities=policy == "priority")
    driver.run(steps)
    leyline, cache = engine.leyline, engine.leyline.cache
    assert cache.free == cache.capacity // BLOCK
    assert not leyline.turns
    assert not leyline._withholder._firsts
    assert not (cache._doomed or cache._due or cache._leaving or cache.pending._waiting)
    assert all(block.ref_cnt == 0 for block in cache._pool.blocks[1:])
    return driver


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.nightly) for s in (1, 2))])
def test_random_sessions_under_pressure(
    engine: SplicingEngine, subject: OracleModel, seed: int
) -> None:
    """Answers, receipts and slots hold over hundreds of random steps."""
    driver = run(seed, engine, subject, 600)
    assert driver.spliced > 2
    assert driver.preempted > 3
    assert driver.aborted > 3
    assert driver.forgot > 3
    assert driver.compared > 30
    assert not driver.failed


@pytest.mark.parametrize("seed", [10, pytest.param(11, marks=pytest.mark.nightly)])
def test_random_failures_cost_prefills_only(
    engine: SplicingEngine, subject: OracleModel, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies that fail in the worker, in the planner or in the orders change no answer."""
    rng = random.Random(seed)

    def failing(original: Any, odds: float) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if rng.random() < odds:
                raise RuntimeError("injected")
            return original(*args, **options)

        return call

    leyline = engine.leyline
    for owner, name in (
        (engine.rows.pool, "splice"),
        (leyline._stepper, "_move"),
        (leyline, "_enter"),
        (leyline._admission, "_splice"),
        (leyline._admission, "look_up"),
    ):
        monkeypatch.setattr(owner, name, failing(getattr(owner, name), 0.25))
    driver = run(seed, engine, subject, 400)
    assert driver.failed > 0
    assert driver.compared > 20
