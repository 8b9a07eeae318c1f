"""Models of SGLang, made small from their published configurations: measured, spliced or refused.

The verdicts are those of docs/models.md. Every commit measures two, the nightly run all of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from leyline_lab.sglang_models.shrunken import names

REPOSITORY = Path(__file__).parents[3]
VERDICTS: dict[str, dict[str, Any]] = json.loads(
    (REPOSITORY / "docs" / "results" / "models.json").read_text(encoding="utf-8")
)
BOUNDS = {"float32": 1e-4, "bfloat16": 4e-3}
"""Largest error of a spliced key by the model's dtype; in bf16 one rounding is up to 2^-8."""
CONTROL = 1e-2
"""Least error of a wrong splice."""
EACH_KIND = (
    "deepseek-v3",
    "gemma-3-text",
    "glm-4.6",
    "lfm2",
    "llama-4-scout",
    "mellum-2",
    "nemotron-3-nano",
    "qwen2.5-vl-7b",
    "qwen3-30b-a3b",
)
"""MLA, two rotations, half a band, states, layers without positions, windows, states beside keys
that stand still, three axes, and the usual one."""
EVERY_COMMIT = ("gemma-3-text", "lfm2", "phi-4-mini")
"""One of rows alone, one with states, and one that is refused; each takes half a minute."""


def test_every_configuration_has_a_verdict() -> None:
    """The committed verdicts are those of the configurations that ship, and are what they say."""
    assert sorted(VERDICTS) == names()
    assert all(verdict["architecture"] for verdict in VERDICTS.values())
    for verdict in VERDICTS.values():
        assert bool(verdict["reason"]) is not verdict["splices"]
        assert verdict["measured"] or not verdict["splices"]


def run_bench(folder: Path, wanted: Sequence[str], *flags: str) -> dict[str, dict[str, Any]]:
    """Measure models as the laboratory does, in a process of its own."""
    file = folder / "verdicts.json"
    lab = [sys.executable, "-P", "-m", "leyline_lab", "models"]
    command = [*lab, *wanted, *flags, "--json", str(file)]
    subprocess.run(command, check=True, timeout=900)
    verdicts: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return verdicts


def check(verdicts: dict[str, dict[str, Any]]) -> None:
    """Check measured verdicts against the committed ones, and splices against their bounds."""
    for name, verdict in verdicts.items():
        expected = VERDICTS[name]
        for key in ("architecture", "measured", "splices", "reason", "rotary", "pool", "state"):
            assert verdict[key] == expected[key], (name, key)
        assert verdict["free"], f"the probe of {name} leaks slots"
        if verdict["splices"]:
            errors = dict(verdict["errors"])
            right = [errors.pop(kind) for kind in ("spliced", "state") if kind in errors]
            assert max(right) <= BOUNDS[verdict["dtype"]], name
            assert min(errors.values()) >= CONTROL, (name, errors)


@pytest.fixture(scope="module")
def each_kind(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The verdicts of a few models, measured once."""
    return run_bench(tmp_path_factory.mktemp("models"), EVERY_COMMIT)


@pytest.mark.parametrize("name", EVERY_COMMIT)
def test_a_model_is_measured_as_documented(name: str, each_kind: dict[str, dict[str, Any]]) -> None:
    """The verdict is the page's; what splices is right to the bound, and wrong splices aren't."""
    check({name: each_kind[name]})


@pytest.mark.nightly
@pytest.mark.parametrize("page_size", [1, 64])
def test_all_models_are_measured_as_documented(page_size: int, tmp_path: Path) -> None:
    """All configurations, with pages of one token and of 64."""
    verdicts = run_bench(tmp_path, (), "--page-size", str(page_size))
    assert sorted(verdicts) == names()
    check(verdicts)


@pytest.mark.nightly
def test_models_in_bfloat16_are_measured_alike(tmp_path: Path) -> None:
    """The gate explains keys of 16 bits, too, and refuses the same models."""
    verdicts = run_bench(tmp_path, EACH_KIND, "--dtype", "bfloat16")
    for name, verdict in verdicts.items():
        assert verdict["splices"] is VERDICTS[name]["splices"], (name, verdict["reason"])
        if verdict["splices"]:
            assert verdict["errors"]["spliced"] <= BOUNDS["bfloat16"], name
