"""LoRA adapters on a CPU, in plain PyTorch: SGLang's back end ``torch_native``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from torch import Tensor


def register_adapters() -> None:
    """Let SGLang's modules for adapters make tensors on a machine without pinned memory."""
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    for module in (layers, torch_backend):
        module.torch = _Unpinned(module.torch)
    Tensor.pin_memory = _as_it_is  # type: ignore[method-assign,assignment]


class _Unpinned(ModuleType):
    """PyTorch, but that no tensor is made in pinned memory, which only an accelerator brings."""

    def __init__(self, torch: ModuleType) -> None:
        super().__init__(torch.__name__)
        self._torch = torch
        for name in ("empty", "tensor", "zeros"):
            setattr(self, name, partial(_unpinned, getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)


def _unpinned(
    make: Callable[..., Any], *args: Any, pin_memory: bool = False, **options: Any
) -> Any:
    del pin_memory
    return make(*args, **options)


def _as_it_is(tensor: Tensor, *_: object) -> Tensor:
    return tensor
