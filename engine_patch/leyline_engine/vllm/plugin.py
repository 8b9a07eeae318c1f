"""Entry point ``leyline`` of ``vllm.general_plugins``: runs in every vLLM process.

It registers the connector, and hooks what no interface of vLLM's reaches: the scheduler, the worker
that measures its KV cache, and the routes of the API server. A vLLM of a version that wasn't tested
is left as it is, and the connector's name is unknown to it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

from leyline_engine.contract import VLLM, engine_versions, is_tested
from leyline_engine.vllm.facts.allow_list import CONNECTOR

_MODULE = "leyline_engine.vllm.connector"

log = logging.getLogger(__name__)


class UntestedVersionError(RuntimeError):
    """This version of vLLM wasn't tested; Leyline doesn't touch it."""


def register() -> None:
    """Extend this vLLM process.

    Raises:
        UntestedVersionError: the version of vLLM isn't one that was tested.
    """
    from vllm import __version__
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from leyline_engine.vllm.server.http import register_http

    if CONNECTOR in KVConnectorFactory._registry:
        return
    if not is_tested(VLLM, __version__):
        tested = ", ".join(engine_versions(VLLM))
        raise UntestedVersionError(f"Leyline is tested with vLLM {tested}, not with {__version__}")
    KVConnectorFactory.register_connector(CONNECTOR, _MODULE, CONNECTOR)
    _hook_scheduler()
    _hook_worker()
    _hook_core()
    register_http()


def chosen(vllm_config: Any) -> bool:
    """Return True if an engine is started with Leyline's connector."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.kv_connector == CONNECTOR


def _hook_scheduler() -> None:
    """Have vLLM's own scheduler classes made with Leyline's hooks, which rest without it."""
    from vllm.config import SchedulerConfig

    from leyline_engine.vllm.scheduler import hooked

    original = SchedulerConfig.get_scheduler_cls

    @wraps(original)
    def get_scheduler_cls(self: Any) -> type:
        scheduler: type = original(self)
        return scheduler if self.scheduler_cls is not None else hooked(scheduler)

    SchedulerConfig.get_scheduler_cls = get_scheduler_cls


def _hook_worker() -> None:
    """Measure a worker's KV cache when it has one."""
    from vllm.v1.worker.gpu_worker import Worker

    def measured(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def initialize_from_config(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if chosen(self.vllm_config):
                _measure(self)
            return result

        return initialize_from_config

    Worker.initialize_from_config = measured(Worker.initialize_from_config)


def _measure(worker: Any) -> None:
    """Measure a worker's rows, and open them for its connector."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from leyline_engine.vllm.facts.worker_facts import read_worker_facts

    layers = worker.vllm_config.compilation_config.static_forward_context
    names = [
        name
        for group in worker.model_runner.kv_cache_config.kv_cache_groups
        for name in group.layer_names
    ]
    caches = {name: layers[name].kv_cache for name in names}
    facts = read_worker_facts(worker.model_runner, caches)
    get_kv_transfer_group().measured(facts, caches)
    if worker.use_v2_model_runner:
        follow_advances(worker.model_runner)


def follow_advances(runner: Any) -> None:
    """Have a V2 model runner continue requests after the rows that were copied for them.

    It counts a running request's tokens on the device itself, where the V1 runner takes the
    scheduler's number in each step.
    """
    original = runner.update_requests

    def update_requests(scheduler_output: Any) -> None:
        original(scheduler_output)
        orders = getattr(scheduler_output.kv_connector_metadata, "orders", None)
        if orders is None or not orders.advanced:
            return
        states = runner.req_states
        for request, tokens in orders.advanced.items():
            states.num_computed_tokens.stage_write_elem(states.req_id_to_index[request], tokens)
        states.num_computed_tokens.apply_write()

    runner.update_requests = update_requests


def _hook_core() -> None:
    """Give the engine core the method that the API server's commands call."""
    from vllm.v1.engine.core import EngineCore

    from leyline_engine.vllm.control import CONTROL_METHOD

    def control(self: Any, message: str) -> str:
        connector = self.scheduler.get_kv_connector()
        answer: str = connector.leyline.control(message)
        return answer

    setattr(EngineCore, CONTROL_METHOD, control)
