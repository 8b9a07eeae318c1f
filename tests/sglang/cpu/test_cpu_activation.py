"""The CPU platform stays away from every machine that has something better."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt import platforms

from leyline_lab.sglang_cpu.activation import activate

VARIABLES = ("SGLANG_PLATFORM", "SGLANG_USE_CPU_ENGINE", "SGLANG_PLUGINS")

pytestmark = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="the choices of a machine without an accelerator"
)


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def _chosen() -> str:
    """Name of the platform class that SGLang takes on this machine."""
    return type(platforms._resolve_platform()).__name__


def _pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")


def _install_vendor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another distribution with a platform plugin, which takes any machine."""
    info = folder / "vendor_sglang-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor-sglang\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.platforms]\nvendor = vendor_sglang:use\n")
    (folder / "vendor_sglang.py").write_text(
        "from sglang.srt.platforms.interface import SRTPlatform\n"
        "class VendorPlatform(SRTPlatform): pass\n"
        "def use(): return 'vendor_sglang.VendorPlatform'\n"
    )
    monkeypatch.syspath_prepend(str(folder))


def test_a_machine_without_an_accelerator_is_taken() -> None:
    """With nothing set and nothing found, SGLang takes the CPU platform."""
    assert _chosen() == "LeylineCpuPlatform"


def test_it_can_be_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLANG_PLATFORM=leyline_cpu names it."""
    monkeypatch.setenv("SGLANG_PLATFORM", "leyline_cpu")
    assert _chosen() == "LeylineCpuPlatform"


def test_a_gpu_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """If PyTorch sees a CUDA device, SGLang's own platform runs it."""
    _pretend_cuda(monkeypatch)
    assert activate() is None
    assert _chosen() == "CudaSRTPlatform"


def test_rocm_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ROCm device, which PyTorch calls cuda, is left to SGLang as well."""
    _pretend_cuda(monkeypatch)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert activate() is None
    assert _chosen() == "RocmSRTPlatform"


@pytest.mark.parametrize("name", ["xpu", "npu", "musa", "hpu", "mps", "mtia"])
def test_other_accelerators_go_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other kind of device that PyTorch knows keeps the platform away."""
    device = SimpleNamespace(is_available=lambda: True)
    monkeypatch.setattr(torch, name, device, raising=False)
    assert activate() is None


def test_a_device_that_plugs_into_pytorch_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """So does an accelerator that PyTorch reports without a module known by name."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert activate() is None


def test_a_gpu_is_never_overruled_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named on a GPU machine, it refuses, and SGLang says so rather than run on the CPU."""
    _pretend_cuda(monkeypatch)
    monkeypatch.setenv("SGLANG_PLATFORM", "leyline_cpu")
    with pytest.raises(RuntimeError, match=r"activate\(\) returned None"):
        _chosen()


def test_sglangs_cpu_engine_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLANG_USE_CPU_ENGINE=1 asks for SGLang's own CPU engine and gets it."""
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert _chosen() == "CpuSRTPlatform"


def test_a_vendors_platform_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside another installed platform it steps aside, unless it is chosen by name."""
    _install_vendor(tmp_path, monkeypatch)
    assert _chosen() == "VendorPlatform"
    monkeypatch.setenv("SGLANG_PLATFORM", "leyline_cpu")
    assert _chosen() == "LeylineCpuPlatform"
