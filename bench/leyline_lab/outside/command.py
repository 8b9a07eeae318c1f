"""``leyline bench outside``: a published benchmark on a user's endpoint, arm by arm."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from ..console import resumable
from ..errors import PlanError

if TYPE_CHECKING:
    from rich.console import Console

    from .arms import OutsideArm
    from .benchmarks import Benchmark
    from .plan import Plan


class OutsideBenchmark(StrEnum):
    """Benchmarks that can be run."""

    COMPLEXITY_TRAP = "complexity-trap"
    LOCA_BENCH = "loca-bench"
    DEBUG_GYM = "debug-gym"
    CUSTOM = "custom"


def command(
    *,
    benchmark: Annotated[OutsideBenchmark, typer.Option(help="Benchmark to run.")],
    upstream: Annotated[str, typer.Option(metavar="URL", help="The engine's base URL.")],
    model: Annotated[str, typer.Option(help="Model, as the engine calls it.")],
    arms: Annotated[
        str, typer.Option(help="Arms to compare; splice+profile needs --profile.")
    ] = "re-prefill,splice",
    checkout: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The installed benchmark.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(metavar="N|IDS", help="The first N tasks, or some by id.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Policy of all arms; each benchmark has its own.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The model's fidelity profile.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, max=100, help="Runs of each arm.")] = 1,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Tasks at once.")] = 4,
    config: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Configuration in the checkout, instead of the usual."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="debug-gym: hub id or folder of the tokenizer [MODEL].")
    ] = None,
    run: Annotated[
        str | None, typer.Option("--command", help="custom: the command to run.")
    ] = None,
    results: Annotated[
        str, typer.Option(help="custom: lines, or the format of one of the benchmarks.")
    ] = "lines",
    extra: Annotated[
        list[str] | None, typer.Option(help="Argument for the benchmark's command; repeatable.")
    ] = None,
    between: Annotated[
        str | None, typer.Option(help="Command in front of each run, to empty the engine's cache.")
    ] = None,
    patience: Annotated[
        float, typer.Option(min=1, help="Seconds without an engine until a run is given up.")
    ] = 60,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for all files.")] = Path(
        "out/outside"
    ),
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Print the commands, and run nothing.")
    ] = False,
) -> None:
    """Run a published agent benchmark on your engine, once per arm, and compare.

    re-prefill: the policy edits, the engine recomputes. splice: the policy edits,
    the engine splices. splice+profile: as the model's fidelity profile says.

    Writes OUT/ARM/run-N with the benchmark's own files, and OUT/summary.json with
    score (Wilson's 95 % interval), paired difference, tokens by source, share
    served and wall time. Run the same command again to continue: finished runs
    and tasks stay. docs/outside-benchmarks.md says how to install each benchmark.

    \b
    Example: leyline bench outside --benchmark debug-gym --model NAME \\
        --upstream http://gpu1:30000 --checkout ~/debug-gym --repeat 4
    """
    from .endpoint import base_of
    from .plan import Plan
    from .table import dry_run
    from .tasks import Selection

    with _explained(out) as console:
        chosen = _benchmark(benchmark, run, results)
        plan = Plan(
            benchmark=chosen,
            upstream=base_of(upstream),
            model=model,
            arms=_arms(arms, profile),
            policy=_policy(policy or chosen.policy),
            out=out.resolve(),
            checkout=_checkout(chosen, checkout, dry=dry),
            selection=Selection.parse(tasks),
            repeat=repeat,
            workers=workers,
            config=config,
            extra=tuple(extra or ()),
            command=_split(run, "--command"),
            profile=profile,
            tokenizer=tokenizer,
            between=_split(between, "--between"),
            patience_s=patience,
        )
        if dry:
            for line in dry_run(plan):
                typer.echo(line)
            return
        _run(plan, console)


def _run(plan: Plan, console: Console) -> None:
    from rich.console import Console

    from ..files import write_whole
    from .running import run_plan
    from .summary import summarize
    from .table import print_summary

    outcomes = run_plan(plan, lambda line: console.print(line, markup=False, highlight=False))
    summary = summarize(plan, outcomes)
    write_whole(plan.out / "summary.json", json.dumps(summary, indent=2) + "\n")
    print_summary(Console(), summary)


def _benchmark(name: OutsideBenchmark, run: str | None, results: str) -> Benchmark:
    from .benchmarks import ComplexityTrap, Custom, DebugGym, LocaBench, ResultFormat

    if (name is OutsideBenchmark.CUSTOM) != (run is not None):
        raise PlanError("--benchmark custom needs --command, and no other benchmark takes one")
    match name:
        case OutsideBenchmark.COMPLEXITY_TRAP:
            return ComplexityTrap()
        case OutsideBenchmark.LOCA_BENCH:
            return LocaBench()
        case OutsideBenchmark.DEBUG_GYM:
            return DebugGym()
        case OutsideBenchmark.CUSTOM:
            formats = [each.value for each in ResultFormat]
            if results not in formats:
                raise PlanError(f"--results takes one of: {', '.join(formats)}")
            return Custom(_split(run, "--command"), ResultFormat(results))


def _arms(text: str, profile: Path | None) -> tuple[OutsideArm, ...]:
    from leyline_proxy.settings import Settings

    from .arms import check_profile, parse_arms

    arms = parse_arms(text)
    check_profile(arms, profile, Settings.model_fields)
    return arms


def _policy(spec: str) -> str:
    """Return a spec that the proxy will take. Raises PlanError."""
    from leyline_policies import PolicyError, load_pipeline

    try:
        load_pipeline(spec)
    except PolicyError as error:
        raise PlanError(f"--policy: {error}") from error
    return spec


def _checkout(benchmark: Benchmark, checkout: Path | None, *, dry: bool) -> Path:
    from .benchmarks import check_checkout

    if dry and benchmark.source is not None:
        return (checkout or Path(benchmark.source.repository.rpartition("/")[2])).resolve()
    return check_checkout(benchmark, checkout)


def _split(text: str | None, option: str) -> tuple[str, ...]:
    """Return the words of a command. Raises PlanError."""

    try:
        words = tuple(shlex.split(text)) if text is not None else ()
    except ValueError as error:
        raise PlanError(f"{option} has an open quote") from error
    if text is not None and not words:
        raise PlanError(f"{option} is empty")
    return words


@contextmanager
def _explained(out: Path) -> Iterator[Console]:
    """End the command as :func:`.resumable` does; SIGTERM is taken as Ctrl-C."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with resumable("leyline bench outside", out) as console:
            yield console
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(*_: object) -> NoReturn:
    """Stop as Ctrl-C does, so that the benchmark and the proxy are stopped, too."""
    raise KeyboardInterrupt
