"""A model of SGLang loaded in this process from a configuration alone, with random weights.

SGLang keeps one server's settings per process: load one model in each child of a fork.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

_FACTORY = "probed"


def load_model(folder: Path, **flags: Any) -> tuple[Any, Any]:
    """Load a model as a scheduler does, up to the tree cache.

    Args:
        folder: holds a ``config.json``; weights are random.
        flags: server arguments, over those of the CPU launcher.

    Returns:
        SGLang's context for the factory of a tree cache, and a tree that it made.
    """
    os.environ["SGLANG_ROPE_CACHE_FP32"] = "1"
    from sglang.srt.mem_cache import kv_cache_builder
    from sglang.srt.mem_cache.registry import (
        create_unified_radix_cache,
        register_radix_cache_backend,
    )
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    register_wrappers()
    arguments = ServerArgs(**(_DEFAULTS | {"model_path": str(folder)} | flags))
    arguments.resolve_once()
    worker = _worker(arguments)
    randomize(worker.model_runner.model)
    _finish_wrapped(worker.model_runner.model)
    seen: list[Any] = []

    def factory(context: Any) -> Any:
        seen.append(context)
        return create_unified_radix_cache(context)

    register_radix_cache_backend(_FACTORY, factory)
    built = kv_cache_builder.build_kv_cache(
        server_args=arguments,
        model_config=worker.model_config,
        tp_worker=worker,
        page_size=arguments.page_size or 1,
        spec_algorithm=SpeculativeAlgorithm.NONE,
        enable_metrics=False,
        enable_kv_cache_events=False,
        enable_hierarchical_cache=False,
    )
    return seen[0], built.tree_cache


def register_wrappers() -> None:
    """Let configurations be read whose classes ship with a checkpoint alone."""
    from sglang.srt.configs.step3p7 import Step3p7VisionEncoderConfig
    from transformers import AutoConfig, PreTrainedConfig

    # The class that ships with this one leaves its entries as they are; transformers' own doesn't.
    plain = type("Plain", (PreTrainedConfig,), {"model_type": "mimo_v2_flash"})
    AutoConfig.register("mimo_v2_flash", plain, exist_ok=True)
    for kind, vision in {
        "interns1": PreTrainedConfig,
        "step_robotics": Step3p7VisionEncoderConfig,
    }.items():
        AutoConfig.register(kind, _wrapper(kind, vision), exist_ok=True)


def _wrapper(kind: str, vision: type[Any]) -> type[Any]:
    """Return a configuration of a text part as it is, and of a part for images, never run."""
    from transformers import AutoConfig, PreTrainedConfig

    class Wrapper(PreTrainedConfig):  # type: ignore[misc,unused-ignore]
        model_type = kind

        def __init__(
            self,
            text_config: dict[str, Any] | None = None,
            vision_config: dict[str, Any] | None = None,
            **more: Any,
        ) -> None:
            text = dict(text_config or {})
            if text:
                self.text_config = AutoConfig.for_model(text.pop("model_type"), **text)
            self.vision_config = vision(**(_VISION | (vision_config or {})))
            super().__init__(**more)

    return Wrapper


_VISION: dict[str, Any] = {
    "hidden_act": "gelu",
    "norm_type": "layer_norm",
    "layer_norm_eps": 1e-6,
    "drop_path_rate": 0.0,
    "dropout": 0.0,
    "initializer_factor": 1.0,
    "qkv_bias": True,
    "qk_normalization": False,
    "num_channels": 3,
}


def _worker(arguments: Any) -> Any:
    """Return a worker whose model has its pools and kernels, but no weights yet."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.layers.quantization.unquant import initialize_bf16_gemm_config
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.runtime_context import (
        SpawnRanks,
        get_device,
        publish,
        spawn_world_rank,
    )
    from sglang.srt.server_args import PortArgs

    ports = PortArgs.init_new(arguments)
    rank = spawn_world_rank(arguments, tp_rank=0, pp_rank=0)
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    for initialize in (
        initialize_moe_config,
        initialize_fp8_gemm_config,
        initialize_bf16_gemm_config,
        initialize_fp4_gemm_config,
    ):
        initialize()
    bootstrap.init_parallel_runtime(
        server_args=arguments, device=get_device().device, dist_port=ports.nccl_port
    )
    bootstrap.init_layer_runtime(model_config=ModelConfig.from_server_args(arguments))
    worker = TpModelWorker(server_args=arguments, gpu_id=0, nccl_port=ports.nccl_port)
    runner = worker.model_runner
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    runner.init_cuda_graphs()
    return worker


_DEFAULTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "load_format": "dummy",
    "device": "cpu",
    "dtype": "float32",
    "max_total_tokens": 2048,
    "max_running_requests": 4,
    "chunked_prefill_size": 128,
    "mem_fraction_static": 0.5,
    "disable_overlap_schedule": True,
    "radix_cache_backend": _FACTORY,
}


def _finish_wrapped(model: torch.nn.Module) -> None:
    """Do what loading real weights ends with; SGLang leaves it out for dummy ones in a wrapper."""
    for module in model.children():
        finish: Any = getattr(module, "post_load_weights", None)
        if finish is not None:
            finish()


def randomize(model: torch.nn.Module, *, seed: int = 3) -> None:
    """Give a model weights in which attention matters, and norms that aren't all alike."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            norm = parameter.dim() == 1 and "norm" in name
            parameter.copy_(1 + 0.3 * noise if norm else 0.1 * noise)
