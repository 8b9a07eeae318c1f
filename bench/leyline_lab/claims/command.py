"""The work of ``leyline claims litmus`` and ``sweep``: test an engine against the contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from leyline_engine.admit.plan import PAGE_SIZES

from ..console import reported
from .cases import CASES, SPLICING_CASES
from .litmus import CaseResult, OpenRuntime, Runtime, run_suite
from .picture import draw
from .sweep import SweepPolicy, SweepRow, run_sweep

_NAME = "leyline claims"
ALLOCATOR = "micro"
"""Name of the block allocator, whose blocks have no content to splice."""

ENGINES: Final[Mapping[str, tuple[str, str]]] = {
    ALLOCATOR: ("leyline_lab.claims.litmus", "open_micro"),
    "replay": ("leyline_lab.claims.replay_runtime", "open_replay"),
    "sglang": ("leyline_lab.claims.sglang_runtime", "open_sglang"),
    "vllm": ("leyline_lab.claims.vllm_runtime", "open_vllm"),
}
"""Module and name of each engine's :data:`.litmus.OpenRuntime`, imported when asked for."""

_PAGES = tuple(sorted(PAGE_SIZES))
PAGES: Final[Mapping[str, tuple[int, ...]]] = {
    "replay": _PAGES,
    "sglang": _PAGES,
    # Its kernels for CPUs have no others.
    "vllm": tuple(size for size in _PAGES if size % 32 == 0),
}
"""Tokens per page that engines can have, the default first."""


def litmus(engine: str, page: int | None, json_out: Path | None) -> None:
    """Run the named cases on an engine, print them, and write them to ``json_out``.

    Raises:
        typer.Exit: a case fails, or no such engine or page.
    """
    cases = CASES if engine == ALLOCATOR else CASES + SPLICING_CASES
    size = _page_of(engine, page)
    results = run_suite(cases, _open(engine, size))
    passed = sum(result.passed for result in results)
    summary = {"engine": engine, "page_size": size, "passed": passed, "of": len(results)}
    _write(json_out, summary | {"cases": results})
    _print_litmus(results, engine)
    if passed < len(results):
        raise typer.Exit(1)


def sweep(engine: str, page: int | None, json_out: Path | None, plot: Path | None) -> None:
    """Run the sweep on an engine, print it, and write it to ``json_out`` and ``plot``.

    Raises:
        typer.Exit: a row is void, no such engine or page, or the picture can't be drawn.
    """
    size = _page_of(engine, page)
    rows = run_sweep(_open(engine, size))
    _write(json_out, {"engine": engine, "page_size": size, "rows": rows})
    _print_sweep(rows, engine)
    if plot is not None:
        with reported(_NAME):
            draw(rows, plot)
    if any(row.void for row in rows):
        raise typer.Exit(1)


def _page_of(engine: str, page: int | None) -> int:
    """Return the tokens per page of an engine."""
    if engine not in ENGINES:
        raise _usage_error(f"no engine is called {engine}; there are {', '.join(sorted(ENGINES))}")
    if engine == ALLOCATOR:
        if page is not None:
            raise _usage_error(f"the engine {engine} has pages of its own: leave --page-size out")
        return 1
    sizes = PAGES[engine]
    if page is not None and page not in sizes:
        raise _usage_error(
            f"pages of {engine} can't have {page} tokens; choose one of {list(sizes)}"
        )
    return sizes[0] if page is None else page


def _open(engine: str, page: int) -> OpenRuntime:
    module, name = ENGINES[engine]
    try:
        opener: Callable[..., Runtime] = getattr(import_module(module), name)
    except ImportError as error:
        raise _usage_error(f"the engine {engine} is not installed here: {error}") from error
    return opener if engine == ALLOCATOR else partial(opener, page=page)


def _usage_error(message: str) -> typer.Exit:
    console = Console(stderr=True)
    console.print(f"{_NAME}: {message}", style="red", markup=False, highlight=False)
    return typer.Exit(2)


def _write(out: Path | None, document: dict[str, Any]) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        text = msgspec.json.format(msgspec.json.encode(document), indent=2)
        out.write_bytes(text + b"\n")


def _print_litmus(results: tuple[CaseResult, ...], engine: str) -> None:
    passed = sum(result.passed for result in results)
    table = Table(title=f"claims on {engine}: {passed} of {len(results)} cases")
    for name in ("case", "outcomes, read from the events", "spoilt traces caught", ""):
        table.add_column(name)
    for result in results:
        caught = result.mutants - len(result.missed)
        said = ", ".join(dict.fromkeys(outcome for outcome, _ in result.expected))
        table.add_row(
            result.name,
            said if result.passed else escape(_complaint(result)),
            f"{caught} of {result.mutants}",
            "[green]ok[/green]" if result.passed else "[red]FAILED[/red]",
        )
    Console().print(table)


def _complaint(result: CaseResult) -> str:
    if result.verdict.void:
        return f"void: {result.verdict.void}"
    seen = ", ".join(f"{found.outcome} {found.subject}" for found in result.verdict.findings)
    wanted = ", ".join(f"{outcome} {subject}" for outcome, subject in result.expected)
    return f"expected {wanted}; read {seen}; told {list(result.told)}; missed {list(result.missed)}"


def _print_sweep(rows: tuple[SweepRow, ...], engine: str) -> None:
    table = Table(
        title=f"a claim of 60 pages and a request of 70 on {engine}",
        caption="pages left of the claim; [red]refused[/red] names what is in the way",
    )
    table.add_column("policy")
    for usable in dict.fromkeys(row.usable for row in rows):
        table.add_column(str(usable), justify="right")
    for policy in SweepPolicy:
        cells = [
            f"{row.resident}" if row.served else f"{row.resident} [red]refused[/red]"
            for row in rows
            if row.policy is policy
        ]
        table.add_row(policy.value, *cells)
    Console(width=120).print(table)
