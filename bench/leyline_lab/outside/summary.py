"""The figures of all arms and their comparison. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from leyline_lab.fidelity.experiment import Estimate
from leyline_lab.fidelity.statistics import paired, share

from .accounts import Account
from .arms import BASELINE, OutsideArm
from .outcomes import RunOutcome
from .plan import Plan, Run

Outcomes = Mapping[Run, RunOutcome]
Attempts = dict[tuple[int, str], bool]
"""True for an attempt that solved its task, by number of the run and id."""


def summarize(plan: Plan, outcomes: Outcomes) -> dict[str, Any]:
    """Return the summary's document.

    Pairs are the tasks that two arms both have, in the same repeat.
    """
    arms = {arm: _of_arm(outcomes, arm) for arm in plan.arms}
    attempts = {arm: attempts_of(outcomes, arm) for arm in plan.arms}
    base = attempts.get(BASELINE)
    others = [arm for arm in plan.arms if arm is not BASELINE]
    return {
        **plan.document(),
        "repeat": plan.repeat,
        "arms": {arm.value: figures for arm, figures in arms.items()},
        "paired": {
            arm.value: compared
            for arm in others
            if base is not None and (compared := _paired(attempts[arm], base)) is not None
        },
        "notes": _notes(plan, outcomes),
    }


def attempts_of(outcomes: Outcomes, arm: OutsideArm) -> Attempts:
    """Return all attempts of an arm."""
    return {
        (run.number, task): score.solved
        for run, outcome in outcomes.items()
        if run.arm is arm
        for task, score in outcome.scores.items()
    }


def _of_arm(outcomes: Outcomes, arm: OutsideArm) -> dict[str, Any]:
    mine = [outcome for run, outcome in outcomes.items() if run.arm is arm]
    scores = [score for outcome in mine for score in outcome.scores.values()]
    account = sum((outcome.account for outcome in mine), Account())
    solved = sum(score.solved for score in scores)
    return {
        "settings": mine[0].settings,
        "engine": mine[0].engine,
        "revision": mine[0].revision,
        "runs": len(mine),
        "attempts": len(scores),
        "solved": solved,
        "failed": sum(score.failed for score in scores),
        "score": _interval(share(solved, len(scores))),
        "prompt_tokens": account.prompt,
        **asdict(account),
        "served_share": account.served_share,
        "wall_s": round(sum(outcome.wall_s for outcome in mine), 1),
        "parts": sum(len(outcome.parts) for outcome in mine),
    }


def _paired(arm: Attempts, base: Attempts) -> dict[str, Any] | None:
    both = sorted(arm.keys() & base.keys())
    if not both:
        return None
    found = paired([arm[each] for each in both], [base[each] for each in both])
    return {
        "against": BASELINE.value,
        "pairs": found.pairs,
        "wins": found.wins,
        "losses": found.losses,
        "difference": _interval(found.difference),
    }


def _interval(found: Estimate) -> dict[str, float]:
    return {name: round(getattr(found, name), 4) for name in ("value", "low", "high")}


def _notes(plan: Plan, outcomes: Outcomes) -> list[str]:
    """Return what a reader must know before comparing arms."""
    notes: list[str] = []
    found = outcomes.values()
    if not all(outcome.isolated for outcome in found) and len(outcomes) > 1:
        notes.append(
            "the engine doesn't keep tenants' KV apart, and nothing emptied its cache between "
            "runs (--between): later runs found prompts of earlier ones cached"
        )
    if any(len(outcome.parts) > 1 for outcome in found):
        notes.append("a run was continued: tasks that had been under way count twice in tokens")
    if any(not part.ended for outcome in found for part in outcome.parts):
        notes.append("a run was killed: the tokens of its last seconds are missing")
    if any(outcome.account.failed_requests for outcome in found):
        notes.append("requests to the model failed; proxy.log of the run has the reasons")
    source = plan.benchmark.source
    revisions = {outcome.revision for outcome in found}
    if source is not None and revisions != {source.commit}:
        notes.append("the checkout isn't at the commit whose formats this version knows")
    tasks = {run: frozenset(outcome.scores) for run, outcome in outcomes.items()}
    if len(set(tasks.values())) > 1:
        notes.append("the runs have different tasks; the paired difference takes the common ones")
    return notes
