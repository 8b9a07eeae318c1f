"""The choice of the platform: entry point ``leyline_cpu`` of ``sglang.srt.platforms``.

SGLang loads this module wherever Leyline is installed, also on GPU machines: it imports nothing
of SGLang, and PyTorch only when asked.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points

PLATFORM_NAME = "leyline_cpu"
_PLATFORM_CLASS = "leyline_lab.sglang_cpu.platform.LeylineCpuPlatform"
_GROUP = "sglang.srt.platforms"
_DEVICE_MODULES = ("cuda", "xpu", "npu", "musa", "hpu", "mps", "mtia")


def activate() -> str | None:
    """Return the platform's class for SGLang to load, or None to leave the machine to others.

    None if PyTorch sees an accelerator, if SGLang's own CPU engine was asked for
    (``SGLANG_USE_CPU_ENGINE=1``), and beside another vendor's platform unless this one was chosen
    (``SGLANG_PLATFORM=leyline_cpu``): a vendor's device may show only once its platform is loaded.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" or accelerator_present():
        return None
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM_NAME and _other_platforms():
        return None
    return _PLATFORM_CLASS


def accelerator_present() -> bool:
    """Return True if PyTorch sees a device other than the CPU.

    ``torch.accelerator`` knows the device that the build was made for and those that plug into
    PyTorch; vendors' modules are asked too, since some do neither.
    """
    import torch

    if torch.accelerator.is_available():
        return True
    modules = (getattr(torch, name, None) for name in _DEVICE_MODULES)
    return any(module.is_available() for module in modules if module is not None)


def _other_platforms() -> set[str]:
    return entry_points(group=_GROUP).names - {PLATFORM_NAME}
