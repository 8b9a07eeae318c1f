"""The wheel: what users install, without what only contributors run."""

from __future__ import annotations

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def shipped() -> frozenset[str]:
    """Paths in the wheel, as its build would pack them."""
    wheel = pytest.importorskip(
        "hatchling.builders.wheel", reason="`make setup` installs hatchling"
    )
    files = wheel.WheelBuilder(str(REPOSITORY)).recurse_included_files()
    return frozenset(Path(file.distribution_path).as_posix() for file in files)


def test_the_wheel_has_what_commands_and_engines_need(shipped: frozenset[str]) -> None:
    """Code, type markers, templates, weights and the demo's session are packed."""
    for path in (
        "leyline_proxy/cli/main.py",
        "leyline_proxy/bench/command.py",
        "leyline_proxy/demo/session.jsonl.gz",
        "leyline_policies/py.typed",
        "leyline_engine/benches/unrotated.py",
        "leyline_proxy/evaluation/report.html.jinja",
        "leyline_engine/claims/book.py",
        "leyline_engine/sglang/plugin.py",
    ):
        assert path in shipped, path
    assert any(path.endswith(".safetensors") for path in shipped)


def test_the_laboratory_stays_in_the_checkout(shipped: frozenset[str]) -> None:
    """Neither the claims laboratory nor the demo's recorder is packed, nor any test."""
    for folder in ("proxy/leyline_proxy/lab", "engine_patch/leyline_engine/lab"):
        assert list((REPOSITORY / folder).glob("*.py")), folder
    assert not [path for path in shipped if "lab" in Path(path).parts]
    assert {Path(path).parts[0] for path in shipped} == {
        "leyline_engine",
        "leyline_policies",
        "leyline_proxy",
    }
