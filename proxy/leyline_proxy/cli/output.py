"""Output that the commands share: usage errors, JSON, and texts of others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

USAGE_ERROR = 2


def usage_error(command: str, message: str) -> typer.Exit:
    """Print why a command can't do what it was called for, and return its end."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        f"[red]leyline {command}:[/red] {escape(message)}"
    )
    return typer.Exit(USAGE_ERROR)


@contextmanager
def usage_errors(command: str, *kinds: type[Exception]) -> Iterator[None]:
    """End a command for an error of these kinds, as :func:`usage_error`."""
    try:
        yield
    except kinds as error:
        raise usage_error(command, str(error)) from error


def print_json(document: object) -> None:
    """Print a document as indented JSON."""
    typer.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def shown(text: str, stand_in: str = " ") -> str:
    """Return a text of others for the terminal, without markup and cursor movements."""
    return escape("".join(each if each.isprintable() else stand_in for each in text))
