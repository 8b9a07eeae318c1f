"""Tests of Leyline in vLLM, which has an environment of its own."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))

if find_spec("vllm") is None:
    collect_ignore_glob = ["*"]

# What importing vLLM warns of; every other warning is an error.
_OF_VLLM = (
    "ignore:`torch.jit.script:DeprecationWarning",
    "ignore:builtin type (SwigPyPacked|SwigPyObject|swigvarlink) has no:DeprecationWarning",
)


def pytest_configure(config: pytest.Config) -> None:
    """Let vLLM be imported."""
    for rule in _OF_VLLM:
        config.addinivalue_line("filterwarnings", rule)
