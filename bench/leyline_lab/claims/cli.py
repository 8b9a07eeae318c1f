"""``leyline claims litmus`` and ``sweep``: the contract of claims, tested on engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_Engine = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Engine to test: micro (only a block allocator), replay, or, if installed, sglang or "
        "vllm.",
    ),
]
_Json = Annotated[
    Path | None, typer.Option("--json", metavar="OUT", help="Write the results here.")
]
_Page = Annotated[
    int | None,
    typer.Option(
        "--page-size",
        metavar="TOKENS",
        help="Tokens per page: 1 (the default), 16, 32, 64 or 128; on vllm 32 (the default), 64 or "
        "128.",
    ),
]


app = typer.Typer(no_args_is_help=True, help="Test whether an engine keeps its claims.")


def register(root: typer.Typer) -> None:
    """Add the group."""
    root.add_typer(app, name="claims")


@app.command()
def litmus(*, engine: _Engine = "micro", page: _Page = None, json_out: _Json = None) -> None:
    """Run the named cases on an engine, and derive their outcomes from its events alone.

    Each trace is then spoilt: one event is dropped, or two that depend on each other are swapped.
    If a spoilt trace gives the same outcome as the whole trace, the case fails. Exits with 1 if a
    case fails.
    """
    from . import command

    command.litmus(engine, page, json_out)


@app.command()
def sweep(
    *,
    engine: _Engine = "micro",
    page: _Page = None,
    json_out: _Json = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Draw the sweep: .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Put a claim of 60 pages and a request of 70 into pools of 80 to 140 pages.

    Under each policy: is the request served, and what is left of the claimed pages?
    """
    from . import command

    command.sweep(engine, page, json_out, plot)
