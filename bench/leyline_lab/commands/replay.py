"""``leyline replay``: the cost of an edit policy with and without splicing, on recorded traces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..console import print_notes, reported, write_json
from ..options import JsonOut, Limit, Policy, TurnPlot, Undeclared

if TYPE_CHECKING:
    from ..engines.process import EngineProcess
    from ..engines.stack import StackOptions

_POOL_TOKENS = 131_072
"""Pool size of a server started here; as large as the replay engine's."""


class ReplayedEngine(StrEnum):
    """Engines for the replay of a session."""

    REPLAY = "replay"
    SGLANG = "sglang"
    VLLM = "vllm"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "replay",
        epilog=(
            "Example:  leyline replay session.jsonl.gz --policy drop_failed_calls\n\n"
            "Several files:  leyline replay *.jsonl.gz --json out/replay.json"
        ),
    )(replay)


def replay(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
            help="Recorded sessions, messages or chat requests: .json or .jsonl, optionally with "
            ".gz. Several are played one after the other.",
        ),
    ],
    *,
    policy: Policy = "keep_all",
    arms: Annotated[
        str, typer.Option(help="Arms to compare: off (computed), radix, splice.")
    ] = "off,radix,splice",
    undeclared: Undeclared = None,
    engine: Annotated[
        ReplayedEngine, typer.Option(help="The engine in this process, or a real SGLang or vLLM.")
    ] = ReplayedEngine.REPLAY,
    url: Annotated[
        str | None,
        typer.Option(
            help="A running SGLang or vLLM, which is flushed! Without it, one starts on the CPU."
        ),
    ] = None,
    limit: Limit = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A bundled model, a folder or a hub id \\[leyline-recall]. vLLM: a random one."
        ),
    ] = None,
    pool_tokens: Annotated[
        int | None, typer.Option(min=1, help="Size of the engine's KV pool in tokens.")
    ] = None,
    page_size: Annotated[
        int | None,
        typer.Option(
            "--page-size",
            "--page",
            help="Tokens per page of the started engine: 1, 16, 32, 64 or 128 \\[1, vLLM 32].",
        ),
    ] = None,
    json_out: JsonOut = None,
    plot: TurnPlot = None,
) -> None:
    """Replay recorded agent sessions and count where every prompt token came from.

    Each arm gets a fresh stack in this process, driven by the OpenAI SDK. With
    --engine sglang or vllm, each arm gets a fresh proxy, and all use one server
    that is flushed between arms. The recorded answers are fed back and the model's own
    answers are thrown away, so every arm serves the same requests.
    """
    from rich.console import Console

    from leyline_proxy.telemetry.logging import configure_logging

    from ..engines.stack import StackOptions
    from ..replay.arms import parse_arms
    from ..replay.arms import replay as run_replay
    from ..replay.plot import draw
    from ..replay.table import ArmProgress, print_report
    from ..traces.conversations import read_files

    configure_logging("warning", "json")
    title = f"{', '.join(file.name for file in files)}, policy {policy}"
    with reported("leyline replay", ValueError) as console:
        chosen = parse_arms(arms)
        trace = read_files(files, limit)
        if url is not None and engine is ReplayedEngine.REPLAY:
            raise ValueError("--url is the address of a server: add --engine sglang or vllm")
        if url is not None and page_size is not None:
            raise ValueError("the server at --url has its pages already: leave out --page-size")
        rules = parse_rules(undeclared or ())
        options = StackOptions(policy, rules, model, pool_tokens, page_size)
        print_notes(console, trace.skipped)
        with (
            _placed(options, engine, url) as placed,
            ArmProgress(console, trace.requests) as progress,
        ):
            report = run_replay(trace, chosen, placed, progress)
        if plot is not None:
            draw(report.runs, plot, title)
    print_report(Console(), report, title)
    write_json(json_out, report.to_json())


@contextmanager
def _placed(
    options: StackOptions, engine: ReplayedEngine, url: str | None
) -> Iterator[StackOptions]:
    """Yield the options with the engine's address, while the engine runs."""
    if engine is ReplayedEngine.REPLAY:
        yield options
    elif url is not None:
        yield replace(options, engine_url=url.rstrip("/"))
    else:
        with _server(options, engine) as server:
            yield replace(options, engine_url=server.url)


def _server(options: StackOptions, engine: ReplayedEngine) -> AbstractContextManager[EngineProcess]:
    """Return a server of the engine, started when it is entered."""
    from ..engines.sglang import sglang_server
    from ..engines.vllm import vllm_server

    log = Path(f"out/replay_{engine.value}.log")
    pool, page = options.pool_tokens or _POOL_TOKENS, options.page_tokens
    if engine is ReplayedEngine.VLLM:
        return vllm_server(options.model, log, pool_tokens=pool, block=page)
    flags = [f"--max-total-tokens={pool}", f"--page-size={page or 1}"]
    return sglang_server(options.model, log, flags)


def parse_rules(items: list[str] | tuple[str, ...]) -> dict[str, str]:
    """Return ``ROLE=MODE`` pairs as a mapping.

    Raises:
        typer.BadParameter: an item without a role or a mode.
    """
    rules: dict[str, str] = {}
    for item in items:
        role, _, mode = item.partition("=")
        if not role or not mode:
            raise typer.BadParameter(f"{item!r} is not ROLE=MODE, for example tool=amortize")
        rules[role.strip()] = mode.strip()
    return rules
