"""One vLLM server for all tests of the proxy in front of it; without vLLM they are skipped."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.sglang_stack import API_KEY, HINTS_SECRET

REPOSITORY = Path(__file__).resolve().parents[3]
PYTHON = REPOSITORY / ".venv-vllm" / "bin" / "python"
sys.path.insert(0, str(REPOSITORY / "tests" / "vllm" / "support"))

from vllm_server import VllmServer  # noqa: E402 - beside the plugin's own tests

MODEL = "leyline-random"
BLOCKS = 160
"""A small pool, so that a claim leaves too little room for a long prompt."""


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """vLLM with the connector, an API key and a secret; its log must stay clean."""
    if not PYTHON.is_file():
        pytest.skip("vLLM isn't installed here: make vllm-setup")
    place = tmp_path_factory.mktemp("vllm")
    runpy.run_path(str(REPOSITORY / "deploy/vllm/tiny_model.py"))["main"](place / "model")
    transfer = json.dumps({"kv_connector": "LeylineConnector", "kv_role": "kv_both"})
    flags = ("--api-key", API_KEY, "--served-model-name", MODEL, "--kv-transfer-config", transfer)
    flags += ("--num-gpu-blocks-override", str(BLOCKS))
    with VllmServer(
        place / "model",
        place / "log",
        flags,
        {"LEYLINE_HINTS_SECRET": HINTS_SECRET},
        python=str(PYTHON),
    ) as server:
        yield server
        server.check_clean()
