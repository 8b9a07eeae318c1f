"""Additions to SGLang's ``torch_native`` back end for MLA models and short suffixes on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

from leyline_lab.sglang_cpu.host_tier import register_host_tier
from leyline_lab.sglang_cpu.linear_attention import register_linear_attention
from leyline_lab.sglang_cpu.operations import (
    register_adapters,
    register_experts,
    register_operations,
)

ATTENTION_BACKEND = "torch_native"


def register_in_worker() -> None:
    """Register what a scheduler process lacks: attention, tables, experts, adapters, operations."""
    _register_attention()
    _register_mla_dispatch()
    _register_rotary_factory()
    _take_cpu_for_a_cpu()
    register_experts()
    register_adapters()
    register_operations()
    register_linear_attention()
    register_host_tier()


def _register_attention() -> None:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    @register_attention_backend(ATTENTION_BACKEND)
    def create(runner: Any) -> Any:
        from leyline_lab.sglang_cpu.backend import CpuAttentionBackend

        return CpuAttentionBackend(runner)


def _register_mla_dispatch() -> None:
    """Always use the absorbed form.

    ``torch_native`` reads K and V back from the pool, in which MLA keeps only the latent. Without
    an entry of its own it gets Triton's, which expands.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        AttnForwardMethod,
    )

    AttentionBackendRegistry.register(ATTENTION_BACKEND, lambda *_: AttnForwardMethod.MLA)


def _register_rotary_factory() -> None:
    """Replace the factory directly, not by SGLang's hook registry.

    The registry may be importing this very process's modules, in order to apply its hooks, when
    this function runs.
    """
    from sglang.srt.layers.rotary_embedding import factory

    factory.get_rope_cpu = partial(_rope_on_cpu, factory.get_rope_cpu)


def _rope_on_cpu(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wrap SGLang's CPU factory, which knows DeepSeek's YaRN alone; others get the common one."""
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    call = signature(original).bind(*args, **kwargs).arguments
    scaling = call.get("rope_scaling")
    if scaling is not None and scaling.get("rope_type") == "deepseek_yarn":
        return original(*args, **kwargs)
    call.pop("device", None)
    return get_rope(**call)


def _take_cpu_for_a_cpu() -> None:
    """Let ranks of data-parallel attention pad their batches, and exchange them.

    SGLang takes only its own CPU engine for a CPU. On any other platform it pins memory for an
    accelerator, gathers by an operation that no CPU has, and copies rows with a Triton kernel.
    """
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import dp_attention
    from sglang.srt.model_executor import forward_batch_info

    forward_batch_info._is_cpu = parallel_state._is_cpu = True
    # With experts on several ranks as well; otherwise NCCL's. This one sums on all ranks and cuts.
    group = parallel_state.GroupCoordinator
    group.reduce_scatterv = group._deterministic_reduce_scatterv
    dp_attention.memcpy_func = dp_attention.memcpy_cpu
