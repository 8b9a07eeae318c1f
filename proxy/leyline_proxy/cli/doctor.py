"""``leyline doctor``: what an engine is and whether it splices."""

from __future__ import annotations

from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from leyline_engine.contract import CAPABILITY_PATH, Capability

NOT_SPLICING = 1


class Unreachable(Exception):  # noqa: N818 - a finding, no failure of ours
    """No capability document could be had; the message says why."""


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(
        name="doctor",
        epilog="Example:  leyline doctor http://127.0.0.1:8790 --json | jq .splices",
    )(doctor)


def doctor(
    url: str = typer.Argument(help="Base URL of an engine, or of a Leyline proxy before one."),
    as_json: bool = typer.Option(False, "--json", help="Print the document itself."),
    timeout: float = typer.Option(10.0, min=0.1, help="Seconds to wait for an answer."),
) -> None:
    """Print an engine's capability document and whether it splices.

    Exits with 0 when it does, with 1 when it doesn't or can't be reached.
    """
    try:
        capability = fetch_capability(url, timeout)
    except Unreachable as finding:
        if as_json:
            typer.echo(msgspec.json.encode({"splices": False, "error": str(finding)}).decode())
        else:
            Console(stderr=True).print(f"[red]{escape(str(finding))}[/red]")
        raise typer.Exit(NOT_SPLICING) from finding
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(capability), indent=2).decode())
    else:
        _print(capability)
    if not capability.splices:
        raise typer.Exit(NOT_SPLICING)


def fetch_capability(url: str, timeout: float) -> Capability:
    """The capability document of the engine or proxy at ``url``.

    Raises:
        Unreachable: no answer, no document, or one that doesn't follow the contract.
    """
    import httpx

    base = url if "://" in url else f"http://{url}"
    base = base.rstrip("/").removesuffix("/v1")
    try:
        response = httpx.get(base + CAPABILITY_PATH, timeout=timeout)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unreachable(f"{base} can't be reached: {error or type(error).__name__}") from error
    if response.status_code != httpx.codes.OK:
        raise Unreachable(
            f"{base} answers, but {CAPABILITY_PATH} gives {response.status_code}: this engine runs "
            "without the Leyline plugin, so nothing will be spliced."
        )
    try:
        return msgspec.json.decode(response.content, type=Capability)
    except msgspec.DecodeError as error:
        raise Unreachable(f"{base} gives no valid capability document: {error}") from error


def _print(capability: Capability) -> None:
    console = Console()
    table = Table("Fact", "Value", title="Capability", title_justify="left")
    for name, value in _rows(msgspec.to_builtins(capability)):
        table.add_row(name, escape(value))
    console.print(table)
    if capability.splices:
        console.print("[green]This engine splices.[/green]")
    else:
        reason = capability.unsupported_reason or "it doesn't say why"
        console.print(f"[red]This engine does not splice: {escape(reason)}[/red]")


def _rows(document: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in document.items():
        if isinstance(value, dict):
            rows += _rows(value, f"{prefix}{name}.")
        elif isinstance(value, (list, tuple)):
            rows.append((prefix + name, ", ".join(map(str, value)) or "none"))
        else:
            rows.append((prefix + name, "none" if value in (None, "") else str(value)))
    return rows
