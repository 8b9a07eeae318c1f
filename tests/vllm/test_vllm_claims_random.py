"""Random sessions and claims against a real vLLM engine with too little memory.

Whatever the order of turns, edits, forgets, aborts, preemptions and claims: each block has the
holders that are counted, no claim loses KV without notice, each answer is that of the contract,
forgotten text is in no slot, and every request ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from claim_sessions import ClaimingDriver
from claimant import Claimant, claiming_engine
from contract_kit import load_reference
from oracle_models import OracleModel

from leyline_engine.contract import ClaimState

BLOCKS = 28


@pytest.fixture(scope="module")
def claimant(vllm_model: Path) -> Iterator[Claimant]:
    """Claims on an engine with a small pool and small chunks."""
    with claiming_engine(
        vllm_model, BLOCKS, max_num_batched_tokens=48, max_num_seqs=4, max_model_len=640
    ) as started:
        yield started


@pytest.fixture(scope="module")
def subject(vllm_model: Path) -> OracleModel:
    """The same model in transformers."""
    return load_reference(vllm_model)


@pytest.fixture
def drive(
    claimant: Claimant, subject: OracleModel, caplog: pytest.LogCaptureFixture
) -> Callable[[int], ClaimingDriver]:
    """Take random steps, after which nothing is left and nothing has failed inside vLLM's loop."""

    def run(seed: int) -> ClaimingDriver:
        driver = ClaimingDriver(seed, claimant, subject)
        driver.run(500)
        claimant.rest()
        assert not [record.getMessage() for record in caplog.records if record.exc_info]
        return driver

    return run


def test_claims_and_sessions_in_any_order(drive: Callable[[int], ClaimingDriver]) -> None:
    """Books, locks, ranks, blocks, receipts and answers agree over hundreds of random steps."""
    driver = drive(27)
    assert driver.taken > 10
    assert driver.refused > 0
    assert driver.spliced > 2
    assert driver.forgot > 2
    assert driver.retired > 2
    assert driver.preempted > 2
    assert driver.compared > 20
    assert {ClaimState.MATERIALIZED, ClaimState.RELEASED, ClaimState.DEMOTED} <= driver.ends


@pytest.mark.nightly
def test_claims_and_sessions_in_many_orders(drive: Callable[[int], ClaimingDriver]) -> None:
    """The same, over thousands."""
    drivers = [drive(seed) for seed in range(30, 45)]
    assert sum(driver.refused for driver in drivers) > 4
    assert sum(driver.spliced for driver in drivers) > 30
