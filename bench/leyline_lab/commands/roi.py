"""``leyline roi``: what content reuse would serve of recorded traffic, without an engine."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..console import reported, write_json
from ..options import AnchorTokens, JsonOut, Limit, Policy, Undeclared
from .replay import parse_rules

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from ..roi.playing import Player
    from ..roi.results import FileRoi, RoiSettings
    from ..traces.recordings import Trace

_TIMEOUT_S = 1.0
"""Seconds for one policy on one turn, as in the proxy."""


class CountedMode(StrEnum):
    """Values of the setting ``reuse`` that an estimate can assume."""

    OBSERVE = "observe"
    LIVE = "live"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "roi",
        epilog="Example:  leyline roi sessions.jsonl.gz --policy prune --plot out/roi.png",
    )(roi)


def roi(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
            help="Recorded sessions as for leyline policies try: .json or .jsonl, optionally "
            "with .gz. The sessions of a file are one tenant's, in order.",
        ),
    ],
    *,
    policy: Policy = "keep_all",
    undeclared: Undeclared = None,
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="Folder with your model's tokenizer.json and chat template, or shipped.",
        ),
    ] = "shipped",
    retained_turns: Annotated[
        int, typer.Option(min=1, max=64, help="Turns of a session that edits may copy from.")
    ] = 4,
    cache_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Live tokens, the least recently used go first. Default: no bound."
        ),
    ] = None,
    page_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens per page of your engine's cache.")
    ] = 1,
    anchor_tokens: AnchorTokens = 1,
    mode: Annotated[
        CountedMode,
        typer.Option(help="Count content beside the cache as it is, or as if it were copied."),
    ] = CountedMode.OBSERVE,
    limit: Limit = None,
    json_out: JsonOut = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="OUT.png", help="Write a picture by file and turn here.")
    ] = None,
) -> None:
    """Estimate what content reuse would serve of recorded sessions, without engine or GPU.

    Policies, plan and admission are the proxy's and the engine's own; only the
    model is missing. Each prompt token counts for the first that would serve it:

    [bold]prefix[/bold]   the longest exact beginning that any session of the file has in the cache.

    [bold]edits[/bold]    spliced from the session's own turns, after edits of the policies, or of
    the harness where --undeclared allows it.

    [bold]reuse[/bold]    the same content, 64 tokens or more, anywhere else in the cache.

    [bold]prefill[/bold]  computed.
    """
    from rich.console import Console

    from leyline_policies import PolicyError

    from ..roi.report import draw_roi, print_notes, print_roi
    from ..roi.results import RoiReport, RoiSettings
    from ..traces.conversations import read_conversations

    rules = parse_rules(undeclared or ())
    named = tuple(f"{role}={what}" for role, what in rules.items())
    settings = RoiSettings(
        policy,
        named,
        tokenizer,
        retained_turns,
        cache_tokens,
        mode.value,
        page_tokens,
        anchor_tokens,
    )
    with reported("leyline roi", PolicyError, ValueError, OSError) as errors:
        player = _player(settings)
        traces = [(file.name, read_conversations(file).first(limit)) for file in files]
        report = RoiReport(_played(player, traces, errors), settings)
        print_notes(errors, report)
        print_roi(Console(), report)
        write_json(json_out, report.to_json())
        if plot is not None:
            draw_roi(report, plot, f"Prompt tokens by source, policy {policy}, reuse: {mode.value}")


def _player(settings: RoiSettings) -> Player:
    """Return the player for these settings.

    Raises:
        PolicyError, ValueError: a setting is wrong; the message names it.
    """
    from leyline_engine.contract import ReuseMode
    from leyline_policies import load_pipeline
    from leyline_proxy.edits.time_limit import TimeLimit
    from leyline_proxy.model.undeclared import UndeclaredRules

    from ..roi.playing import Player
    from ..traces.renderer import load_renderer

    return Player(
        load_renderer(settings.tokenizer),
        load_pipeline(settings.policy),
        UndeclaredRules.parse(settings.undeclared),
        settings.retained_turns,
        settings.cache_tokens,
        ReuseMode(settings.mode),
        partial(TimeLimit(_TIMEOUT_S), "roi"),
        settings.page_tokens,
        settings.anchor_tokens,
    )


def _played(
    player: Player, traces: Sequence[tuple[str, Trace]], errors: Console
) -> tuple[FileRoi, ...]:
    """Play every file, with a progress bar."""
    from rich.progress import Progress

    with Progress(console=errors, transient=True) as bars:
        task = bars.add_task("requests", total=sum(trace.requests for _, trace in traces))
        return tuple(player.play(trace, name, lambda: bars.advance(task)) for name, trace in traces)
