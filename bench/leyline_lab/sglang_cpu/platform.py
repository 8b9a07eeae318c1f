"""The platform class that SGLang loads on a machine without an accelerator."""

from __future__ import annotations

import logging
import os
from typing import Any

from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities

from leyline_lab.sglang_cpu.registration import ATTENTION_BACKEND, register_in_worker

log = logging.getLogger(__name__)


class LeylineCpuPlatform(CpuSRTPlatform):
    """A CPU that runs the plain PyTorch implementation of every fused operation.

    SGLang's own CPU engine calls compiled kernels, which its pip package doesn't bring for a CPU.
    """

    _enum = PlatformEnum.OOT
    # Neither Triton kernels nor captured graphs run here.
    capabilities = PlatformCapabilities()

    def get_device(self, device_id: int = 0) -> str:
        """Return the default of ``--device``; the base class returns an object."""
        return "cpu"

    def get_default_attention_backend(self) -> str:
        """Return the only attention back end that needs nothing but PyTorch."""
        return ATTENTION_BACKEND

    def get_dispatch_key_name(self) -> str:
        """Return the key with which fused operations run their ``forward_native``."""
        return "native"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Fill in the settings that the command line left open.

        SGLang calls this once in the launching process. The schedulers that it starts inherit the
        environment.
        """
        log.warning("No accelerator seen: SGLang runs on this CPU, in plain PyTorch")
        os.environ.setdefault("SGLANG_ROPE_CACHE_FP32", "1")
        # States of convolutions would be halved by default.
        os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", "float32")
        # Compiling an activation takes longer than it saves.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        # Without AMX kernels SGLang's own choice for the device "cpu" doesn't load.
        if server_args.attention_backend in (None, "intel_amx"):
            server_args.attention_backend = ATTENTION_BACKEND
        _vouch_for_attention()
        # "auto" would halve a float32 checkpoint; 16-bit arithmetic is slower here.
        if server_args.dtype == "auto":
            server_args.dtype = "float32"
        # Kernels and their layout are for accelerators.
        server_args.hicache_io_backend = "direct"
        if server_args.hicache_mem_layout == "page_first":
            server_args.hicache_mem_layout = "layer_first"

    def support_mamba_cache_extra_buffer(self) -> bool:
        """Return True: states are copied to slots of the tree in plain PyTorch, too."""
        return True

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """Return True for the algorithms that run in plain PyTorch."""
        return algorithm in {"EAGLE", "EAGLE3"}

    def get_speculative_worker_cls(self, algorithm: str) -> type | None:
        """Prepare SGLang's own worker for this platform, and keep it."""
        from leyline_lab.sglang_cpu.drafting import register_drafting

        register_drafting()
        return None

    def init_backend(self) -> None:
        """Add the parts that SGLang lacks on a CPU to this scheduler process.

        A failure is fatal, as it must be: a plugin's failure would only be logged.
        """
        register_in_worker()


def _vouch_for_attention() -> None:
    """Let SGLang start gpt-oss, which it refuses to: its own back end of the name has no sinks."""
    from sglang.srt.arg_groups import model_hook

    backends_of = model_hook.attention_backends_of

    def known_backends_of(settings: Any) -> tuple[str | None, ...]:
        names = backends_of(settings)
        return tuple("triton" if name == ATTENTION_BACKEND else name for name in names)

    model_hook.attention_backends_of = known_backends_of
