"""``leyline replay`` and ``leyline bench three-arm`` on a real vLLM, small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from leyline_lab.engines.vllm import VLLM
from leyline_lab.errors import EngineProcessError
from leyline_proxy.cli import build_app

BLOCK = 32


@pytest.fixture(autouse=True)
def installed() -> None:
    """Skip where vLLM isn't."""
    try:
        VLLM.python()
    except EngineProcessError:
        pytest.skip("vLLM isn't installed here")


def trace(path: Path, turns: int, window: int) -> Path:
    """A session whose harness leaves out all tool results but the last ones."""
    pool = [{"role": "user", "content": "List the files, and read each of them. " * 12}]
    requests = []
    for turn in range(1, turns + 1):
        text = " ".join(f"File {turn} has {turn * n * 7919} in line {n}." for n in range(30))
        pool += [
            {"role": "assistant", "content": f"I read file {turn} now."},
            {"role": "user", "content": text},
            {"role": "user", "content": "(left out)"},
        ]
        read = range(1, turn + 1)
        shown = [(3 * n - 2, 3 * n - 1 if n > turn - window else 3 * n) for n in read]
        requests.append([0, *(message for pair in shown for message in pair)])
    record = {"id": "s", "pool": pool, "requests": requests}
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    return path


@pytest.mark.nightly
def test_what_a_harness_keeps_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least 99 % of the unchanged tokens, but for a block at either end of what is cached."""
    recorded = trace(tmp_path / "trace.jsonl", turns=8, window=3)
    out = tmp_path / "figures.json"
    options = ["--engine", "vllm", "--undeclared", "user=amortize", "--json", str(out)]
    done = CliRunner().invoke(build_app(), ["replay", str(recorded), *options])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    unchanged, share = found["unchanged_tokens"], found["reuse_of_unchanged"]
    rounding = 2 * BLOCK * 8 / unchanged
    assert share["splice"] >= 0.99 - rounding
    assert share["radix"] < share["splice"] - 0.1


@pytest.mark.nightly
def test_the_arms_part_where_they_should(tmp_path: Path) -> None:
    """Splice prefills what must be, and no more; the others what they always did."""
    out = tmp_path / "figures.json"
    size = ["--concurrency", "2", "--scale", "0.05", "--samples", "2"]
    written = ["--json", str(out), "--log", str(tmp_path / "log")]
    done = CliRunner().invoke(
        build_app(), ["bench", "three-arm", "--engine", "vllm", *size, *written]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())["2"]
    assert found["goal"]["prefilled"]["met"] and found["edit"]["goal"]["prefilled"]["met"]
    assert found["splice"]["spliced_tokens"] > 0.4 * found["splice"]["prompt_tokens"]
    assert found["off"]["hit_ratio"] == 0
    assert 0.4 < found["radix"]["hit_ratio"] < 0.7
