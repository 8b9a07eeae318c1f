"""The laboratory's own commands: each is there, and listing them imports none."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from leyline_lab.__main__ import COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_each_name_has_a_module_that_runs(name: str) -> None:
    """The module of a name exists, and has the function that the command calls."""
    spec = find_spec(f"leyline_lab.{COMMANDS[name][0]}")
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    assert "main" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_help_lists_all_and_imports_none() -> None:
    """The list needs neither torch nor an engine, and names every command."""
    code = (
        "import sys\n"
        "from leyline_lab.__main__ import group\n"
        "try: group()(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'sglang', 'transformers', 'matplotlib'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-P", "-c", code]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert all(f" {name} " in shown.stdout for name in COMMANDS)


def test_a_command_has_flags_of_its_own() -> None:
    """Help after a name is that of the command."""
    command = [sys.executable, "-P", "-m", "leyline_lab", "claims-check", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "python -m leyline_lab claims-check" in shown.stdout
    assert "--claims" in shown.stdout and "--json OUT" in shown.stdout
