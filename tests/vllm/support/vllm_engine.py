"""Tiny random models in a vLLM engine of this process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # With several ranks, vLLM would find its own address by a connection to the internet.
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
}
BLOCK = 32
CONTEXT = 4096


@contextmanager
def engine(folder: Path, **settings: Any) -> Iterator[Any]:
    """Start vLLM in this process on a model's folder; settings are those of ``vllm.LLM``."""
    os.environ.update(_ENVIRONMENT)
    from vllm import LLM

    plain = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": CONTEXT,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 8,
        "block_size": BLOCK,
        "num_gpu_blocks_override": 256,
        "disable_log_stats": True,
    }
    with warnings.catch_warnings():
        # vLLM's own, of the libraries below it.
        warnings.simplefilter("ignore")
        llm = LLM(model=str(folder), **(plain | settings))
    try:
        yield llm
    finally:
        shut_down(llm.llm_engine.engine_core)


def shut_down(core: Any) -> None:
    """End an engine core of this process, so that another can start."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    core.shutdown()
    cleanup_dist_env_and_memory()


def runner_of(llm: Any) -> Any:
    """The model runner of an engine's only worker."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def layers_of(runner: Any) -> dict[str, Any]:
    """The attention layers of a model runner by name."""
    context = runner.vllm_config.compilation_config.static_forward_context
    return {name: layer for name, layer in context.items() if hasattr(layer, "kv_cache")}
