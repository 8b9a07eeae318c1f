"""Files and functions stay small enough to be read at one go, but for those listed by name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("proxy", "policies", "engine_patch", "grafana", "deploy", "bench")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

LONG_FILES = {
    "engine_patch/leyline_engine/claims/book.py": "one state machine: its table and its moves",
}

_OPTIONS = "its parameters are the command's options"
LONG_FUNCTIONS = {
    "bench/leyline_lab/three_arm/command.py command": _OPTIONS,
    "bench/leyline_lab/outside/command.py command": _OPTIONS,
    "bench/leyline_lab/reuse/command.py command": _OPTIONS,
    "bench/leyline_lab/user_turn/command.py command": _OPTIONS,
    "bench/leyline_lab/commands/demo.py demo": _OPTIONS,
    "proxy/leyline_proxy/cli/policies.py try_policies": _OPTIONS,
    "bench/leyline_lab/commands/replay.py replay": _OPTIONS,
    "bench/leyline_lab/commands/roi.py roi": _OPTIONS,
    "proxy/leyline_proxy/cli/serve.py serve": _OPTIONS,
    "proxy/leyline_proxy/wiring/services.py build_services": "the one place that wires services",
    "engine_patch/leyline_engine/rows/kernel.py _move_rows": "one Triton kernel",
}


def product_files() -> Iterator[tuple[str, str]]:
    """Path and text of each file of the product."""
    for folder in PRODUCT:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def test_files_are_short() -> None:
    """No file has more lines than the limit but those listed, and none is listed in vain."""
    lengths = {name: len(text.splitlines()) for name, text in product_files()}
    assert len(lengths) > 300
    assert {name for name, lines in lengths.items() if lines > MAX_FILE_LINES} == set(LONG_FILES)


def test_functions_are_short() -> None:
    """No function has more lines than the limit but those listed, and none is listed in vain."""
    long = {
        f"{name} {node.name}"
        for name, text in product_files()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (node.end_lineno or node.lineno) - node.lineno + 1 > MAX_FUNCTION_LINES
    }
    assert long == set(LONG_FUNCTIONS)
