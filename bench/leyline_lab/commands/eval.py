"""``leyline eval``: the effect of edits on a model's answers, measured against references."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..console import resumable
from ..errors import EngineProcessError, LabError

if TYPE_CHECKING:
    from rich.console import Console

    from leyline_lab.fidelity.experiment import Scale

    from ..evaluation.opening import Target

_LOG = ".sglang.log"
"""End of the name of the file with a started server's output."""


_Engine = Annotated[
    str,
    typer.Option(
        metavar="ENGINE",
        help="replay, in this process; sglang, a server that is started for it; or the address of "
        "a running engine.",
    ),
]
_Model = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="A bundled model, a folder or a hub id. Default: the bundled models, and two with "
        "random weights; sglang: the first of them. With an address: the folder with tokenizer "
        "and chat template, if the engine doesn't give them.",
    ),
]
_ApiKey = Annotated[
    str | None,
    typer.Option(metavar="KEY", envvar="LEYLINE_UPSTREAM_API_KEY", help="API key of the engine."),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "eval",
        epilog=(
            "Example:  leyline eval --quick --json out/eval.json --html out/eval.html\n\n"
            "Your model:  leyline eval --model ~/models/Qwen3-0.6B --json out/qwen3.json\n\n"
            "An engine:  leyline eval --engine http://gpu1:30000 --json out/gpu1.json"
        ),
    )(evaluate)


def evaluate(
    *,
    json_out: Annotated[
        Path, typer.Option("--json", metavar="OUT", help="Write the figures here.")
    ],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="OUT.html", help="Write the report here.")
    ] = None,
    engine: _Engine = "replay",
    model: _Model = None,
    api_key: _ApiKey = None,
    tables: Annotated[
        str, typer.Option(metavar="NAME,…", help="Only these tables \\[all].", show_default=False)
    ] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="Few cases and short answers: some minutes.")
    ] = False,
) -> None:
    """Measure if a model answers over a spliced cache as over a computed one.

    Every prompt is answered four times, from an empty cache each time:

    [bold]full[/bold]         over the whole history.

    [bold]re-prefill[/bold]   over the edited history, prefilled again.

    [bold]splice[/bold]       over the edited history, spliced (mode amortize).

    [bold]no rotation[/bold]  the control: spliced, but moved keys aren't rotated. It must look bad.

    Tables: single_prompt, trajectory_12, random_edits, trajectory_50, stubs. Each has agreement of
    the first token, of the answer and of the called tool, and KL, L2 and top-10 overlap of the
    first token's logits, against both references. stripped_thinking: the same for thinking that the
    model's template strips. kept_state: a cut output that a recurrent state still holds.
    boundary_recompute: the tokens after an edit to compute again; it recommends a fidelity profile.
    composed: whole sessions through a proxy, by policy; recall: with cut outputs that come back.
    removal: the cache after a forget, to the last bit. rotary_sweep, chained_rotations,
    storage_floor: the rotation of keys, without a model.

    An endpoint gives log probabilities of at most 4,096 tokens, and only tables of answers and
    sessions. The control needs --engine sglang. If the engine wants signed hints, set
    LEYLINE_HINTS_SECRET.

    Measured cases are in OUT.journal until the report is there. After an interruption, run the same
    command again: it continues.
    """
    from leyline_lab.fidelity.experiment import Scale
    from leyline_proxy.telemetry.logging import configure_logging

    configure_logging("error", "json")
    scale = Scale.QUICK if quick else Scale.FULL
    with _explained(json_out) as console:
        _check(engine, json_out, html)
        chosen = tuple(filter(None, map(str.strip, tables.split(","))))
        target = _target(engine, model, api_key, json_out)
        document = _run(console, target, scale, json_out, html, tables=chosen)
    _print_findings(document)


def _target(engine: str, model: str | None, api_key: str | None, out: Path) -> Target:
    from ..evaluation.opening import Target

    return Target(engine, model, api_key, out.with_name(f"{out.name}{_LOG}"))


@contextmanager
def _explained(out: Path) -> Iterator[Console]:
    """End the command as :func:`.resumable` does; of a server's log only the place is said."""
    with resumable("leyline eval", out) as console:
        try:
            yield console
        except EngineProcessError as error:
            log = out.with_name(f"{out.name}{_LOG}")
            kept = f" Its output is in {log}" if log.exists() else ""
            first = str(error).partition("\n")[0].rstrip(":")
            raise LabError(f"{first}.{kept}") from error


def _check(engine: str, json_out: Path, html: Path | None) -> None:
    """Find what would fail after hours.

    Raises:
        LabError: an engine that can't be evaluated, or a folder in place of a file.
        OSError: there can be no such file.
    """
    from ..evaluation.opening import is_address

    if engine not in ("replay", "sglang") and not is_address(engine):
        shown = engine.rpartition("@")[2].partition("?")[0]
        raise LabError(
            f"--engine {shown}: give replay, sglang, or the address of an "
            "engine such as http://127.0.0.1:30000, without a key"
        )
    for path in (json_out, html):
        if path is not None and path.is_dir():
            raise LabError(f"{path} is a folder: give the name of a file")
    if html is not None:
        if html.resolve() == json_out.resolve():
            raise LabError("--json and --html name the same file")
        html.parent.mkdir(parents=True, exist_ok=True)


def _run(
    console: Console,
    target: Target,
    scale: Scale,
    json_out: Path,
    html: Path | None,
    *,
    tables: tuple[str, ...],
) -> dict[str, Any]:
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    from ..evaluation.opening import opened
    from ..evaluation.running import evaluate as run_evaluation
    from ..evaluation.sessions import evaluation_sessions

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with (
        opened(target, evaluation_sessions(), scale) as found,
        Progress(*columns, console=console, transient=True) as bars,
    ):

        def begin(left: int) -> Callable[[str], None]:
            task = bars.add_task("cases", total=left)
            return lambda title: bars.update(task, advance=1, description=title)

        return run_evaluation(
            found.evaluation, scale, json_out, html, begin, tables=tables, stack=found.stack
        )


def _print_findings(document: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    for table in document["tables"].values():
        console.print(f"[bold]{table['title']}[/bold]")
        console.print(table["finding"].partition("\n")[0], markup=False, highlight=False)
    for note in document["notes"]:
        console.print(note, markup=False, highlight=False)
    if document["left_out"]:
        console.print(f"Not measured here: {', '.join(document['left_out'])}.", highlight=False)
