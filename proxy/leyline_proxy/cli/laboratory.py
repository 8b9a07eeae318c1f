"""Commands of the laboratory, which is a distribution of its own: found by entry point, or named.

Each entry point is a function ``register(app)`` that adds commands to a :class:`typer.Typer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from typing import cast

import typer

from ..installing import pip_install

Register = Callable[[typer.Typer], None]


@dataclass(frozen=True, slots=True)
class CommandGroup:
    """Commands that another distribution may add, and the help that they have without it."""

    entry_points: str
    """Group of their entry points; each has the command's name."""
    help: Mapping[str, str]
    """A sentence on each of the laboratory's commands, by name."""


COMMANDS = CommandGroup(
    "leyline.commands",
    {
        "replay": "Play recorded sessions to a stack, with and without Leyline.",
        "demo": "Replay a recorded agent session and show where its prompt tokens came from.",
        "eval": "Measure how exactly splices answer.",
        "roi": "Show how much of your traffic's prompts reuse could serve.",
        "bench": "Measure a part of the engine on this machine.",
        "claims": "Test whether an engine keeps its claims.",
        "events": "Follow the KV events that engines publish.",
    },
)
POLICY_COMMANDS = CommandGroup(
    "leyline.commands.policies",
    {"try": "Run a pipeline over recorded sessions, without an engine."},
)


def register_commands(app: typer.Typer, group: CommandGroup) -> None:
    """Add the commands of a group: those installed, and a hint for each that isn't."""
    found = {point.name: point for point in entry_points(group=group.entry_points)}
    for name in [*group.help, *sorted(found.keys() - group.help.keys())]:
        if name not in found:
            _register_problem(app, name, f"{group.help[name]} (not installed)", _hint)
            continue
        point = found[name]
        try:
            cast("Register", point.load())(app)
        except Exception as error:  # a broken plugin must not stop `leyline serve`
            fault = f"{point.value} doesn't load: {type(error).__name__}: {error}"
            _register_problem(app, name, "Broken.", partial(str, fault))


def _hint() -> str:
    return f"It is in the laboratory. Install it with: {pip_install('lab')}"


def _register_problem(app: typer.Typer, name: str, text: str, problem: Callable[[], str]) -> None:
    """Add a command that only reports a problem, whatever its arguments."""

    @app.command(
        name,
        help=text,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def report() -> None:
        typer.echo(f"leyline {name}: {problem()}", err=True)
        raise typer.Exit(2)
