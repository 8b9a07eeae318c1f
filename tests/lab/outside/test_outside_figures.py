"""Intervals, accounts and the summary of ``leyline bench outside``."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from leyline_lab.errors import EndpointError
from leyline_lab.fidelity.statistics import paired, share
from leyline_lab.outside.accounts import Account, account_of
from leyline_lab.outside.arms import OutsideArm
from leyline_lab.outside.benchmarks import DebugGym
from leyline_lab.outside.outcomes import (
    Part,
    RunOutcome,
    outcome_of,
    part_path,
    parts_of,
    write_outcome,
    write_part,
)
from leyline_lab.outside.plan import Plan, Run
from leyline_lab.outside.summary import summarize
from leyline_lab.outside.tasks import TaskScore

COMMIT = DebugGym.source.commit
BASE, SPLICE = OutsideArm.RE_PREFILL, OutsideArm.SPLICE


@pytest.mark.parametrize(
    ("solved", "count", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_equals_published_intervals(
    solved: int, count: int, low: float, high: float
) -> None:
    """The examples of Newcombe 1998 (Statistics in Medicine 17, 857), by the score method."""
    found = share(solved, count)
    assert (round(found.low, 4), round(found.high, 4)) == (low, high)


@pytest.mark.parametrize(
    ("cells", "low", "high"),
    [
        ((20, 12, 2, 16), 0.0562, 0.3292),
        ((36, 12, 2, 0), 0.0569, 0.3404),
        ((36, 14, 0, 0), 0.1528, 0.4167),
        ((2, 97, 1, 0), 0.8721, 0.9854),
        ((0, 29, 1, 20), 0.3865, 0.6900),
        ((0, 30, 0, 20), 0.4445, 0.7239),
        ((54, 0, 0, 0), -0.0664, 0.0664),
    ],
)
def test_paired_differences_equal_published_intervals(
    cells: tuple[int, int, int, int], low: float, high: float
) -> None:
    """Method 10 of Newcombe 1998 (Statistics in Medicine 17, 2635); swapped, it is mirrored."""
    both, wins, losses, neither = cells
    arm = [True] * (both + wins) + [False] * (losses + neither)
    base = [True] * both + [False] * wins + [True] * losses + [False] * neither
    found = paired(arm, base)
    assert (found.pairs, found.wins, found.losses) == (sum(cells), wins, losses)
    assert (round(found.difference.low, 4), round(found.difference.high, 4)) == (low, high)
    mirrored = paired(base, arm).difference
    assert (mirrored.low, mirrored.high) == pytest.approx(
        (-found.difference.high, -found.difference.low)
    )


def test_the_interval_of_a_difference_covers_it() -> None:
    """In 19 of 20 drawn comparisons of correlated arms, the interval holds the true difference."""
    chance, count, draws = random.Random(7), 60, 1500
    cells = [(True, True)] * 9 + [(True, False)] * 5 + [(False, True)] * 2 + [(False, False)] * 4
    covered = 0
    for _ in range(draws):
        drawn = chance.choices(cells, k=count)
        found = paired([arm for arm, _ in drawn], [base for _, base in drawn]).difference
        covered += found.low <= 3 / 20 <= found.high
    assert 0.935 < covered / draws < 0.97


METRICS = """\
# TYPE leyline_prompt_tokens_total counter
leyline_prompt_tokens_total{model="m",source="cached",tenant="t",turn="1"} 100.0
leyline_prompt_tokens_total{model="m",source="spliced",tenant="t",turn="2"} 40.0
leyline_prompt_tokens_total{model="m",source="spliced",tenant="t",turn="3"} 2.0
leyline_prompt_tokens_total{model="m",source="prefilled",tenant="t",turn="1"} 58.0
# TYPE leyline_prompt_tokens_created gauge
leyline_prompt_tokens_created{model="m",source="cached",tenant="t",turn="1"} 1.7e+09
# TYPE leyline_completion_tokens_total counter
leyline_completion_tokens_total{model="m",tenant="t"} 9.0
# TYPE leyline_requests_total counter
leyline_requests_total{model="m",route="/v1/chat/completions",status="200",tenant="t"} 5.0
leyline_requests_total{model="m",route="/v1/chat/completions",status="503",tenant="t"} 2.0
leyline_requests_total{model="m",route="/v1/chat/completions",status="disconnected",tenant="t"} 1.0
leyline_requests_total{model="-",route="/v1/models",status="200",tenant="t"} 9.0
# TYPE leyline_edits_total counter
leyline_edits_total{cause="policy",mode="amortize",outcome="spliced",tenant="t"} 3.0
"""


def test_an_account_is_read_from_metrics() -> None:
    """Tokens add up over turns; only requests to the model count, and failed ones are noticed."""
    account = account_of(METRICS)
    assert account == Account(
        cached=100, spliced=42, prefilled=58, generated=9, requests=8, failed_requests=3, edits=3
    )
    assert (account.prompt, account.served_share) == (200, pytest.approx(0.71))
    assert Account().served_share is None


def test_tokens_of_an_unknown_source_are_an_error() -> None:
    """They would be missing in the prompt's tokens."""
    with pytest.raises(EndpointError, match="recomputed"):
        account_of(METRICS.replace('source="cached"', 'source="recomputed"'))
    with pytest.raises(EndpointError):
        account_of("leyline_requests_total{")


def plan(out: Path, *arms: OutsideArm, repeat: int = 1) -> Plan:
    """A plan of debug-gym."""
    return Plan(
        DebugGym(), "http://e:1", "m", arms or (BASE, SPLICE), "keep_all", out, repeat=repeat
    )


def outcome(solved: str, tasks: str = "abcd", **members: object) -> RunOutcome:
    """A run in which the tasks named in ``solved`` were solved."""
    scores = {task: TaskScore(task in solved) for task in tasks}
    part = Part(Account(cached=10, prefilled=30, requests=4), 2.0, ended=True)
    usual = RunOutcome(scores, (part,), isolated=True, revision=COMMIT)
    return replace(usual, **members)  # type: ignore[arg-type]


def test_pairs_are_the_common_tasks_of_the_same_repeat(tmp_path: Path) -> None:
    """Wins and losses are counted against re-prefill, and a task that only one arm has is in its
    score alone."""
    outcomes = {
        Run(BASE, 1): outcome("ab"),
        Run(SPLICE, 1): outcome("bce", "abcde"),
        Run(BASE, 2): outcome(""),
        Run(SPLICE, 2): outcome("d"),
    }
    summary = summarize(plan(tmp_path, repeat=2), outcomes)
    compared = summary["paired"]["splice"]
    assert (compared["pairs"], compared["wins"], compared["losses"]) == (8, 2, 1)
    assert compared["difference"]["value"] == 0.125
    figures = summary["arms"]["splice"]
    assert (figures["solved"], figures["attempts"], figures["prompt_tokens"]) == (4, 9, 80)
    assert summary["notes"] == [
        "the runs have different tasks; the paired difference takes the common ones"
    ]


def test_there_is_no_difference_without_the_baseline(tmp_path: Path) -> None:
    """Splice alone has a score, and nothing to be compared with."""
    summary = summarize(plan(tmp_path, SPLICE), {Run(SPLICE, 1): outcome("a")})
    assert summary["paired"] == {}
    assert summary["arms"]["splice"]["score"]["value"] == 0.25


def test_notes_name_what_spoils_a_comparison(tmp_path: Path) -> None:
    """Shared caches, continued and killed runs, failed requests and another commit are said."""
    parts = (Part(Account(requests=1, failed_requests=1), 1.0), Part(Account(cached=1), 1.0, True))
    spoilt = outcome("a", parts=parts, isolated=False, revision="0" * 40)
    notes = summarize(plan(tmp_path), {Run(BASE, 1): outcome("a"), Run(SPLICE, 1): spoilt})["notes"]
    words = ["cached", "continued", "killed", "requests to the model failed", "commit"]
    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))


def test_outcomes_survive_their_files(tmp_path: Path) -> None:
    """A run and its parts are read as they were written, parts in order, and a half-written draft
    isn't one."""
    first, second = Part(Account(cached=1), 1.0), Part(Account(cached=2), 2.0, ended=True)
    write_part(part_path(tmp_path, 1), first)
    write_part(part_path(tmp_path, 2), second)
    (tmp_path / ".run.json.part").write_text("{")
    assert outcome_of(tmp_path) is None
    assert parts_of(tmp_path) == (first, second)
    whole = outcome("ab", parts=(first, second))
    write_outcome(tmp_path, whole)
    assert outcome_of(tmp_path) == whole
    assert (whole.account.cached, whole.wall_s) == (3, 3.0)
