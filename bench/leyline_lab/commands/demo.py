"""``leyline demo``: a recorded agent session through the stack, with and without Leyline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..console import print_notes, reported
from ..demo import DEFAULT_POLICY
from ..errors import LabError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo", epilog="Example:  leyline demo --plot out/demo.png")(demo)


def demo(
    *,
    url: Annotated[
        str | None,
        typer.Option(help="Use a stack that is already running; its cache may be warm."),
    ] = None,
    api_key: Annotated[
        str, typer.Option(help="API key for --url.", envvar="LEYLINE_DEMO_API_KEY")
    ] = "demo",
    policy: Annotated[
        str, typer.Option(metavar="SPEC", help="Policy that edits the history before each turn.")
    ] = DEFAULT_POLICY,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N turns.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A bundled model, a folder or a hub id \\[leyline-recall]."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="OUT.png", help="Where to write the picture.")
    ] = Path("out/demo.png"),
    bars: Annotated[
        bool, typer.Option("--bars", help="Draw the turns in the terminal, too.")
    ] = False,
) -> None:
    """Replay a recorded agent session and show where its prompt tokens came from.

    A coding agent repairs a small library in 41 turns, with failed calls and
    retries. Before each turn, a policy shortens old tool output and drops failed
    calls. An ordinary prefix cache pays for this with a new prefill. The session is
    played by arms, each before its own server (leyline serve), driven by the OpenAI SDK:

    [bold]off[/bold]     no cache: every prompt is computed. Counted from the prompts of radix.

    [bold]radix[/bold]   an ordinary prefix cache: everything after an edit is computed again.

    [bold]splice[/bold]  Leyline: the text after an edit is moved.

    It takes one to two minutes on two CPU cores; --limit 10 plays a quarter of the
    turns.

    Afterwards, a bundled model is asked for settings that it read in a second,
    short session. The policy has cut two of them.
    """
    from rich.console import Console

    from ..demo.recall import answers_table
    from ..demo.run import missing_engine, run_against, run_arms, shipped_trace
    from ..replay.plot import draw, print_bars
    from ..replay.table import ArmProgress, arms_table, comparison, notes_of

    if url is None and (missing := missing_engine()) is not None:
        with reported("leyline demo"):
            raise LabError(missing)
    with reported("leyline demo", status=1) as notices:
        trace = shipped_trace().first(limit)
        notices.print(_outlook(trace.requests, url), style="dim", markup=False, highlight=False)
        with ArmProgress(notices, trace.requests) as progress:
            shown = (
                run_against(url, api_key, trace, policy, progress)
                if url is not None
                else run_arms(trace, policy, progress, model=model)
            )
        if plot is not None:
            draw(
                shown.runs,
                plot,
                f"One agent session of {trace.requests} turns, history edited by: {policy}",
            )
    console = Console()
    console.print(arms_table(shown.runs, f"policy: {policy}"))
    print_notes(console, notes_of(shown.runs))
    console.print(comparison(shown.runs), highlight=False)
    if any(shown.answers.values()):
        console.print(answers_table(shown.answers))
    if bars:
        print_bars(console, shown.runs)
    if plot is not None:
        console.print(f"Picture by turn: {plot}", highlight=False)


def _outlook(turns: int, url: str | None) -> str:
    """Return what will be played, and how long it takes."""
    if url is not None:
        return f"Playing {turns} turns to {url}."
    return (
        f"Playing {turns} turns twice: radix is an ordinary prefix cache, splice is Leyline, and "
        "off (no cache) is computed. This takes one to two minutes on two CPU cores."
    )
