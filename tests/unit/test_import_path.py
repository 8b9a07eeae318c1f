"""Processes that are started with ``-m`` or ``-c`` import nothing from the current directory."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.image_build import stages_of

REPOSITORY = Path(__file__).parents[2]
SOURCES = ("proxy", "engine_patch", "policies", "deploy", "bench", "grafana")
SHELLS = {"/bin/bash", "bash", "sh"}
COMMANDS = {"-m", "-c"}


def _python_files() -> Iterator[Path]:
    listed = subprocess.run(
        ["git", "ls-files", *(f"{folder}/*.py" for folder in SOURCES)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    return (REPOSITORY / line for line in listed.stdout.splitlines())


def unsafe_lines(source: str) -> list[int]:
    """The lines of command lines that name a module or a program without ``-P`` in front."""
    found: list[int] = []
    for node in ast.walk(ast.parse(source)):
        words = node.args if isinstance(node, ast.Call) else getattr(node, "elts", [])
        said = [word.value if isinstance(word, ast.Constant) else None for word in words]
        if said and said[0] in SHELLS:
            continue
        # A command line has words after its program; a declared option has names alone.
        for place, word in enumerate(said[:-1]):
            flags = said[1:place]
            if word in COMMANDS and None not in flags and "-P" not in flags:
                found.append(words[place].lineno)
    return found


def test_every_command_of_ours_has_a_safe_path() -> None:
    """No command line in the sources, of images or of Compose runs code without ``-P``."""
    unsafe = [
        f"{path.relative_to(REPOSITORY)}:{line}"
        for path in _python_files()
        for line in unsafe_lines(path.read_text(encoding="utf-8"))
    ]
    for image in (REPOSITORY / "deploy").glob("Dockerfile*"):
        final = stages_of(image)[-1]
        commands = [item.value for name in ("HEALTHCHECK", "ENTRYPOINT") for item in final.of(name)]
        unsafe += [f"{image.name}: {text}" for text in commands if _runs_unsafe_python(text)]
    compose = (REPOSITORY / "deploy" / "compose.yaml").read_text(encoding="utf-8")
    unsafe += re.findall(r"- python3?\n\s+- -[mc]\n", compose)
    assert unsafe == []


def _runs_unsafe_python(text: str) -> bool:
    return re.search(r'"python3?",\s*"-[mc]"', text) is not None


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('run([sys.executable, "-m", "module"])', [1]),
        ('command = (python, "-c", text)', [1]),
        ('start(\n    sys.executable,\n    "-m",\n    module,\n)', [3]),
        ('run([sys.executable, "-P", "-m", "module"])', []),
        ('run(["/bin/bash", "--norc", "-c", command])', []),
        ('run([nginx, "-p", str(logs), "-c", str(config)])', []),
        ('typer.Option("--models", "-m")', []),
    ],
)
def test_an_unsafe_command_is_seen(source: str, lines: list[int]) -> None:
    """The search finds lists, tuples and arguments, and passes over shells and flags."""
    assert unsafe_lines(source) == lines


def test_the_interpreter_keeps_to_it() -> None:
    """A program started so doesn't see a module of the folder that it is started in."""
    command = [sys.executable, "-P", "-c", "import sys; print('' in sys.path)"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"
