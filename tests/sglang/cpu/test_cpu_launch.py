"""The settings of the CPU platform and its launcher, so that a user needs to give only a model."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from sglang.srt.platforms import current_platform
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang_server import SglangServer

from leyline_lab.sglang_cpu import launch
from leyline_lab.sglang_cpu.backend import CpuAttentionBackend


def _parsed(*flags: str) -> ServerArgs:
    """The flags of a launched server as SGLang reads them."""
    command = launch.server_command(["--model-path", "m", *flags])
    return prepare_server_args(command[command.index("sglang.launch_server") + 1 :])


def test_the_users_flags_win() -> None:
    """A flag given by the user replaces the default, in either spelling; the others stay."""
    given = _parsed("--chunked-prefill-size", "64", "--dtype=bfloat16")
    assert (given.chunked_prefill_size, given.dtype) == (64, "bfloat16")
    assert given.max_total_tokens == _parsed().max_total_tokens == 16384


def test_the_launcher_refuses_where_the_platform_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On other machines it names the command that serves them, and starts nothing."""
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("it started a server"))
    with pytest.raises(SystemExit, match="sglang serve --model-path MODEL"):
        launch.main()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((None, "auto"), ("torch_native", "float32")),
        (("intel_amx", "bfloat16"), ("torch_native", "bfloat16")),
        (("flex_attention", "float16"), ("flex_attention", "float16")),
    ],
    ids=["nothing", "SGLang's guess", "both"],
)
def test_defaults_fill_what_is_open(
    given: tuple[str | None, str], expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention and dtype are set where the user said nothing; the rotary cache is float32."""
    monkeypatch.setenv("SGLANG_ROPE_CACHE_FP32", "unset")
    monkeypatch.delenv("SGLANG_ROPE_CACHE_FP32")
    arguments = SimpleNamespace(
        attention_backend=given[0],
        dtype=given[1],
        hicache_io_backend="kernel",
        hicache_mem_layout="page_first",
    )
    current_platform.apply_server_args_defaults(arguments)
    assert (arguments.attention_backend, arguments.dtype) == expected
    # Copies to the host are kernels of a GPU unless they are asked for row by row.
    assert arguments.hicache_io_backend == "direct"
    assert arguments.hicache_mem_layout == "layer_first"
    assert os.environ["SGLANG_ROPE_CACHE_FP32"] == "1"


@pytest.mark.nightly
def test_a_running_server_took_the_defaults(mla_server: SglangServer) -> None:
    """The server that the launcher started runs with the platform's and the launcher's values."""
    info: dict[str, Any] = httpx.get(f"{mla_server.base_url}/server_info", timeout=30).json()
    expected = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "dtype": "float32",
        "max_total_tokens": 16384,
        "chunked_prefill_size": 512,
        "max_running_requests": 8,
    }
    assert {name: info[name] for name in expected} == expected


def test_a_scheduler_process_has_the_replacements() -> None:
    """Importing the model runner, as schedulers do, replaces attention, MLA dispatch and rotary."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.rotary_embedding import get_rope_wrapper
    from sglang.srt.model_executor import model_runner
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        AttnForwardMethod,
    )

    assert model_runner.current_platform is current_platform
    runner = SimpleNamespace(device="cpu", req_to_token_pool=None, token_to_kv_pool=None)
    assert type(ATTENTION_BACKENDS["torch_native"](runner)) is CpuAttentionBackend
    dispatch = AttentionBackendRegistry.get_handler("torch_native")
    assert dispatch(None, None) is AttnForwardMethod.MLA
    rotary = get_rope_wrapper(32, 32, 128, 10000, is_neox_style=False, device="cpu")
    assert rotary.cos_sin_cache.shape == (128, 32)
