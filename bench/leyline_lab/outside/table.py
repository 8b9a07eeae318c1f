"""The summary for a terminal, and the commands of a plan without running them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from ..errors import MissingError
from ..tables import figures_table, share
from .arms import arm_settings, isolation_settings
from .benchmarks import Endpoint, Step
from .plan import Plan, Run
from .proxy_process import serve_flags

_COLUMNS = ("score", "difference", "prefilled", "served", "wall, s")


def print_summary(console: Console, summary: Mapping[str, Any]) -> None:
    """Print the arms of a summary and its notes."""
    title = f"{summary['benchmark']}, {summary['model']}, {summary['policy']}"
    table = figures_table(title, ("arm",), _COLUMNS)
    for arm, figures in summary["arms"].items():
        served, compared = figures["served_share"], summary["paired"].get(arm)
        score = figures["score"]
        table.add_row(
            arm,
            f"{score['value']:.1%} of {figures['attempts']}\n{_ends(score, '')}",
            "–" if compared is None else _difference(compared["difference"]),
            f"{_count(figures['prefilled'])}\nof {_count(figures['prompt_tokens'])}",
            share(served, nothing="–"),
            f"{figures['wall_s']:,.0f}",
        )
    console.print(table)
    for note in summary["notes"]:
        console.print(f"Note: {note}.", markup=False, highlight=False, soft_wrap=True)


def _count(tokens: int) -> str:
    return f"{tokens:,}" if tokens < 10_000_000 else f"{tokens / 1e6:,.0f} M"


def _difference(interval: Mapping[str, float]) -> str:
    return f"{interval['value']:+.1%}\n{_ends(interval, '+')}"


def _ends(interval: Mapping[str, float], sign: str) -> str:
    return f"{interval['low'] * 100:{sign}.1f} to {interval['high'] * 100:{sign}.1f}"


def dry_run(plan: Plan) -> Iterator[str]:
    """Yield the shell lines that a plan would run, with placeholders for address and key."""
    source = plan.benchmark.source
    if source is not None:
        yield "# once: the benchmark, in an environment of its own"
        yield f"git clone {source.repository} {shlex.quote(str(plan.checkout))}"
        yield f"git -C {shlex.quote(str(plan.checkout))} checkout {source.commit}"
        yield from plan.benchmark.install(plan.checkout)
    for run in plan.runs():
        yield ""
        yield f"# {run.arm}, run {run.number} of {plan.repeat}"
        if plan.between:
            yield shlex.join(plan.between)
        yield from _proxy_lines(plan, run)
        job = plan.job(run, Endpoint("http://127.0.0.1:PORT/v1", "KEY"))
        yield f"mkdir -p {shlex.quote(str(job.results))}"
        try:
            files = plan.benchmark.files(job)
        except MissingError as error:
            yield f"# here the run writes its files, once the checkout is there ({error})"
        else:
            for path, text in files.items():
                yield from _file_lines(path, text)
        for step in plan.benchmark.steps(job):
            yield _step_line(step)


def _proxy_lines(plan: Plan, run: Run) -> Iterator[str]:
    settings = arm_settings(run.arm, plan.policy, plan.profile)
    settings |= isolation_settings("bench-RUN", "KEY", isolates=True)
    command = shlex.join(("leyline", "serve", "--port", "0", *serve_flags(plan.upstream)))
    yield (
        f"{_variables(settings)} {command} & "
        "# PORT is in the line base_url; cache_scope is shared if the engine knows no cache_salt"
    )


def _file_lines(path: Path, text: str | None) -> Iterator[str]:
    if text is None:
        yield f"mkdir -p {shlex.quote(str(path))}"
    elif len(text) > 2000:
        yield f"# {path}: {len(text):,} characters, the selected tasks"
    else:
        yield f"cat >{shlex.quote(str(path))} <<'EOF'\n{text}\nEOF"


def _step_line(step: Step) -> str:
    variables = f"{_variables(step.variables)} " if step.variables else ""
    return f"(cd {shlex.quote(str(step.cwd))} && {variables}{shlex.join(step.arguments)})"


def _variables(values: Mapping[str, str]) -> str:
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in values.items())
