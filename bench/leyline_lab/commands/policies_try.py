"""``leyline policies try``: a pipeline over recorded sessions, without an engine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..console import print_notes, reported, write_json
from ..options import AnchorTokens, JsonOut, Limit, TurnPlot

if TYPE_CHECKING:
    from rich.console import Console

    from leyline_policies import Policy

    from ..policy_trial.rules import RuleCheck
    from ..policy_trial.trial import TrialOptions, TrialReport
    from ..traces.recordings import Trace

_TIMEOUT_S = 1.0
"""Seconds for one policy on one turn, as in the proxy."""


def register(app: typer.Typer) -> None:
    """Add the command to the group of policies."""
    app.command(
        "try",
        epilog=(
            'Example:  leyline policies try "prune | drop_failed_calls" sessions.jsonl.gz\n\n'
            "Where it pays:  leyline policies try prune sessions.jsonl.gz --plot try.png"
        ),
    )(try_policies)


def try_policies(
    spec: Annotated[
        str, typer.Argument(metavar="SPEC", help="Policy pipeline, as for leyline serve --policy.")
    ],
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
            help="Recorded sessions, messages or chat requests: .json or .jsonl, optionally with "
            ".gz, as for leyline replay and roi.",
        ),
    ],
    *,
    window: Annotated[
        int | None,
        typer.Option(min=1, help="The model's context window, for policies that use it."),
    ] = None,
    idle: Annotated[
        str, typer.Option(metavar="TIME", help="Pause between turns, such as 90s or 10m.")
    ] = "0s",
    anchor_tokens: AnchorTokens = 1,
    limit: Limit = None,
    turns: Annotated[bool, typer.Option("--turns", help="Show every turn.")] = False,
    check: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Check the rules of the test kit on the first N turns, each policy by itself.",
        ),
    ] = 200,
    json_out: JsonOut = None,
    plot: TurnPlot = None,
) -> None:
    """Run a pipeline over recorded sessions, turn by turn as the proxy does, without an engine.

    Shows the reclaimed tokens by policy, and the rules that a policy breaks. It
    also predicts the cost of the edits, in prompt tokens to prefill:

    [bold]unedited[/bold]  no policy; the cache keeps the prefix up to the first message that
    differs from the turn before.

    [bold]prefix[/bold]    with the policies, on the same cache: everything after an edit is
    computed again.

    [bold]splice[/bold]    with the policies and Leyline: only edited and new messages are
    computed, and everything after a forget or after a change by the client itself.

    Tokens are estimated at four characters each. Answers count as new when they
    come back, and nothing is ever evicted.

    Exits with 1 if a policy fails on a turn or breaks a rule, and with 2 if there is
    nothing to try.
    """
    from rich.console import Console

    from leyline_lab.policy_trial.report import draw_trial, print_trial
    from leyline_lab.policy_trial.trial import TrialOptions
    from leyline_lab.traces.conversations import read_files
    from leyline_policies import PolicyError, load_pipeline
    from leyline_policies.triggers import duration_s

    names = ", ".join(file.name for file in files)
    title = f"{names}, policy {spec}"
    with reported("leyline policies try", PolicyError, ValueError, OSError) as errors:
        policies = load_pipeline(spec)
        options = TrialOptions(window, duration_s(idle), anchor_tokens)
        trace = read_files(files, limit)
        print_notes(errors, trace.skipped)
        report = _tried(trace, policies, options, errors)
        rules = _checked(trace, policies, report, options.window, check)
        if plot is not None:
            draw_trial(report, plot, title)
        figures = {**report.to_json(), "rules": rules.to_json()}
        write_json(json_out, {"policy": spec, "file": names, **figures})
    print_trial(Console(), report, title, turns=turns, rules=rules)
    if report.totals().faults or rules.broken:
        raise typer.Exit(1)


def _checked(
    trace: Trace,
    policies: tuple[Policy, ...],
    report: TrialReport,
    window: int | None,
    most_turns: int,
) -> RuleCheck:
    """Check the rules of the policies that end in time."""
    from leyline_lab.policy_trial.rules import check_rules

    return check_rules(
        policies,
        [(each.id, [request.messages for request in each.requests]) for each in trace.sessions],
        most_turns=most_turns,
        window=window,
        without=report.hanging(),
    )


def _tried(
    trace: Trace, policies: tuple[Policy, ...], options: TrialOptions, errors: Console
) -> TrialReport:
    """Try every session, with a progress bar."""
    from rich.progress import Progress

    from leyline_lab.policy_trial.trial import TrialReport, try_session
    from leyline_proxy.edits.time_limit import TimeLimit

    limit = partial(TimeLimit(_TIMEOUT_S), "trial")
    with Progress(console=errors, transient=True) as bars:
        task = bars.add_task("turns", total=trace.requests)
        return TrialReport(
            tuple(
                try_session(
                    session.id,
                    [request.messages for request in session.requests],
                    policies,
                    options,
                    limit=limit,
                    done=lambda: bars.advance(task),
                )
                for session in trace.sessions
            )
        )
