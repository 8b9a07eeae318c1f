"""The help of commands: options by topic, and examples that can be copied whole."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest
import typer
from typer.testing import CliRunner

from leyline_proxy.cli import build_app
from leyline_proxy.cli.flags import FLAGS

_WIDTH = 80


def commands(
    command: click.Command, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """All commands, each with its words after ``leyline``."""
    yield path, command
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, (*path, name))


def test_every_example_is_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal of 80 columns no command of an example is broken, so it can be copied."""
    monkeypatch.setenv("COLUMNS", str(_WIDTH))
    app, seen = build_app(), 0
    for path, command in commands(typer.main.get_command(app)):
        examples = re.findall(r"leyline [^\n]+", command.epilog or "")
        shown = CliRunner().invoke(app, [*path, "--help"]).output if examples else ""
        for example in examples:
            assert example.strip() in shown, (path, example)
            seen += 1
    assert seen > 15


def test_options_of_serve_are_in_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each option has one topic, and doctor, which takes the same ones, shows the same topics."""
    named = [flag.name for flags in FLAGS.values() for flag in flags]
    assert len(named) == len(set(named)) > 30
    monkeypatch.setenv("COLUMNS", str(_WIDTH))
    for command in ("serve", "doctor"):
        shown = CliRunner().invoke(build_app(), [command, "--help"]).output
        for title in FLAGS:
            assert f"╭─ {title} ─" in shown
        panel = shown.split("╭─ Engines ─")[1].split("╰")[0]
        assert "--upstream" in panel
        assert "--policy" not in panel
