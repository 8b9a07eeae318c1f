"""``leyline replay``: which engine a session is replayed to."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from leyline_proxy.cli import build_app


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A session of one request."""
    path = tmp_path / "trace.jsonl"
    record = {"id": "s", "messages": [{"role": "user", "content": "hi"}], "calls": [{"n": 1}]}
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    return path


def test_an_address_without_its_engine_is_refused(trace: Path) -> None:
    """A caller that gives an address is not served by the engine in this process."""
    done = CliRunner().invoke(build_app(), ["replay", str(trace), "--url", "http://127.0.0.1:1"])
    assert done.exit_code == 2
    assert "add --engine sglang" in " ".join(done.output.split())


def test_pages_of_a_running_server_are_its_own(trace: Path) -> None:
    """They can't be chosen for it, so the command stops before it flushes anything."""
    to = ["--engine", "sglang", "--url", "http://127.0.0.1:1/", "--page-size", "16"]
    done = CliRunner().invoke(build_app(), ["replay", str(trace), *to])
    assert done.exit_code == 2
    assert "has its pages already" in " ".join(done.output.split())


def test_pages_that_no_engine_has_are_refused(trace: Path) -> None:
    """The option reaches the engine that is started, which names the sizes that there are."""
    done = CliRunner().invoke(build_app(), ["replay", str(trace), "--page", "17"])
    assert done.exit_code == 2
    assert "page_tokens can't be 17; choose one of 1, 16" in " ".join(done.output.split())


def test_a_server_that_is_not_there_is_told(trace: Path) -> None:
    """The cache is flushed before anything is measured, and that fails with the address."""
    to = ["--engine", "sglang", "--url", "http://127.0.0.1:1/"]
    done = CliRunner().invoke(build_app(), ["replay", str(trace), *to])
    assert done.exit_code == 2
    assert "the server at http://127.0.0.1:1 was not flushed" in " ".join(done.output.split())


def test_without_sglang_the_way_to_get_it_is_told(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No environment with SGLang: the message names the commands, the variable and --url."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LEYLINE_SGLANG_PYTHON", raising=False)
    done = CliRunner().invoke(build_app(), ["replay", str(trace), "--engine", "sglang"])
    assert done.exit_code == 2
    said = " ".join(done.output.split())
    assert "make sglang-setup" in said and "LEYLINE_SGLANG_PYTHON" in said and "--url" in said


def test_without_vllm_the_variable_is_told(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No environment with vLLM: the message names the variable and --url."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LEYLINE_VLLM_PYTHON", raising=False)
    done = CliRunner().invoke(build_app(), ["replay", str(trace), "--engine", "vllm"])
    assert done.exit_code == 2
    said = " ".join(done.output.split())
    assert "vLLM isn't installed here" in said
    assert "LEYLINE_VLLM_PYTHON" in said and "--url" in said


def test_a_vllm_that_dies_is_shown_with_its_log(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter that is named has no vLLM: its complaint is the message."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEYLINE_VLLM_PYTHON", sys.executable)
    done = CliRunner().invoke(build_app(), ["replay", str(trace), "--engine", "vllm"])
    assert done.exit_code == 2
    said = " ".join(done.output.split())
    assert "vLLM died at its start" in said and "No module named 'vllm'" in said
