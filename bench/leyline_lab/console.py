"""Ends and outputs that the laboratory's commands share: errors, notes, files of figures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .errors import LabError

if TYPE_CHECKING:
    from rich.console import Console

_INTERRUPTED = 130


@contextmanager
def reported(command: str, *also: type[Exception], status: int = 2) -> Iterator[Console]:
    """Yield a console for notices, and end the command with an error in red.

    Args:
        command: its name, in front of the error.
        also: errors that end it beside the laboratory's own and a missing engine.
        status: of the process after an error.
    """
    from rich.console import Console

    from leyline_proxy.upstream.embedded import EngineUnavailable

    console = Console(stderr=True)
    kinds: tuple[type[Exception], ...] = (LabError, EngineUnavailable, *also)
    try:
        yield console
    except kinds as error:
        console.print(f"{command}: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(status) from error


@contextmanager
def resumable(command: str, out: Path) -> Iterator[Console]:
    """Do as :func:`reported` for a command that continues when it is run again.

    Errors have one line; files that can't be written and Ctrl-C end the command, too.

    Args:
        out: named where an error of the system names no file.
    """
    from rich.console import Console

    from leyline_proxy.upstream.embedded import EngineUnavailable

    console = Console(stderr=True)
    status = 2
    try:
        yield console
        return
    except (LabError, EngineUnavailable) as error:
        text = str(error)
    except OSError as error:
        text = f"{error.filename or out} can't be written: {error.strerror}"
    except KeyboardInterrupt:
        text, status = "interrupted; run the same command again to continue", _INTERRUPTED
    line = f"{command}: {' '.join(text.split())}"
    console.print(line, style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(status)


def print_notes(console: Console, notes: Iterable[str]) -> None:
    """Print notes in yellow, a line each."""
    for note in notes:
        console.print(f"note: {note}", style="yellow", markup=False, highlight=False)


def write_json(out: Path | None, document: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write a document into a file, if one is named."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
