"""A V2 model runner's counts of computed tokens follow the rows that are copied for requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from leyline_engine.vllm.connector import StepOrders
from leyline_engine.vllm.orders import Orders
from leyline_engine.vllm.plugin import follow_advances


class Staged:
    """A tensor of the device that takes writes in steps, as vLLM's: this machine has no device."""

    def __init__(self, values: list[int]) -> None:
        self.applied = list(values)
        self._staged: dict[int, int] = {}

    def stage_write_elem(self, index: int, x: int) -> None:
        """Stage a write."""
        self._staged[index] = x

    def apply_write(self) -> None:
        """Carry out the staged writes."""
        for index, value in self._staged.items():
            self.applied[index] = value
        self._staged.clear()


class Runner:
    """A V2 runner with two running requests; vLLM's own code updates them."""

    update_requests = GPUModelRunner.update_requests

    def __init__(self) -> None:
        self.req_states = SimpleNamespace(
            req_id_to_index={"a": 1, "b": 0},
            num_computed_tokens=Staged([300, 64]),
            num_computed_tokens_np=np.array([300, 64]),
            num_computed_prefill_tokens=np.array([300, 64]),
            prefill_len=SimpleNamespace(np=np.array([300, 900])),
        )

    def step(self, metadata: Any) -> list[int]:
        """Update the requests for a step; returns the device's counts."""
        cached = SimpleNamespace(
            req_ids=["a", "b"], num_computed_tokens=[640, 301], new_block_ids=[None, None]
        )
        output = SimpleNamespace(
            scheduled_cached_reqs=cached,
            kv_connector_metadata=metadata,
            new_block_ids_to_zero=None,
            kv_cache_block_copies=None,
        )
        self.update_requests(output)
        assert self.req_states.num_computed_tokens_np.tolist() == [301, 640]
        applied: list[int] = self.req_states.num_computed_tokens.applied
        return applied


@pytest.fixture
def runner() -> Runner:
    """A runner that follows."""
    made = Runner()
    follow_advances(made)
    return made


def test_a_request_continues_after_its_copied_rows(runner: Runner) -> None:
    """The count of the request that advanced is written to the device; the other's is not."""
    assert runner.step(StepOrders(Orders(advanced={"a": 640}))) == [300, 640]


@pytest.mark.parametrize("metadata", [None, StepOrders(), SimpleNamespace()])
def test_without_an_advance_nothing_is_written(runner: Runner, metadata: Any) -> None:
    """Steps without copies, and those of other connectors, leave the device's counts alone."""
    assert runner.step(metadata) == [300, 64]


def test_vllm_has_the_writes_that_are_used() -> None:
    """The stand-in's methods are those of vLLM's own tensor."""
    assert callable(StagedWriteTensor.stage_write_elem)
    assert callable(StagedWriteTensor.apply_write)
