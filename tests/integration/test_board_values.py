"""The numbers of single panels, for series that promtool makes up and Prometheus evaluates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from support import boards
from support.prometheus import promtool

VARIABLES = {
    "$__range": "10m",
    "$__rate_interval": "10m",
    "$tenant": ".*",
    "$model": ".*",
    "$instance": ".*",
}
FAULTS = 'leyline_policy_faults_total{policy="a",fault="raised"}'
REFUSALS = 'leyline_policy_refusals_total{policy="b",fault="timed_out"}'
AUDIT, AUDIT_STREAM = "leyline_audit_failures_total", "leyline_audit_stream_failures_total"
FAULTS_PANEL = "edits-policies: Policy faults since start/A"
LOST_PANEL = "proxy: Audit records lost/A"
TURNS_PANEL = "cache-hit: Edited turns spliced/A"
EDITS_PANEL = "edits-policies: Amortized edits spliced/A"
ENGINE_PANEL = "engine: Edited requests spliced/A"


def _turns(outcome: str, reason: str) -> str:
    return f'leyline_turns_total{{tenant="t",model="m",outcome="{outcome}",reason="{reason}"}}'


def _edits(outcome: str) -> str:
    return f'leyline_edits_total{{tenant="t",cause="policy",mode="amortize",outcome="{outcome}"}}'


def _requests(outcome: str, reason: str) -> str:
    return f'leyline_engine_requests_total{{outcome="{outcome}",reason="{reason}"}}'


@pytest.mark.parametrize(
    ("panel", "per_minute", "expected"),
    [
        (FAULTS_PANEL, {}, 0),
        (FAULTS_PANEL, {FAULTS: 1}, 20),
        (FAULTS_PANEL, {REFUSALS: 3}, 60),
        (FAULTS_PANEL, {FAULTS: 1, REFUSALS: 3}, 80),
        (LOST_PANEL, {AUDIT: 1}, 10),
        (LOST_PANEL, {AUDIT: 1, AUDIT_STREAM: 3}, 40),
        (
            TURNS_PANEL,
            {
                _turns("spliced", "spliced"): 3,
                _turns("reprefilled", "not_worth_it"): 7,
                _turns("reprefilled", "nothing_to_reuse"): 5,
                _turns("edited", "nothing_cached"): 4,
                _turns("unedited", "none"): 9,
            },
            1,
        ),
        (
            TURNS_PANEL,
            {
                _turns("spliced", "spliced"): 3,
                _turns("reprefilled", "not_worth_it"): 7,
                _turns("reprefilled", "source_evicted"): 1,
            },
            0.75,
        ),
        (EDITS_PANEL, {_edits("spliced"): 3, _edits("not_worth_it"): 7}, 1),
        (
            EDITS_PANEL,
            {_edits("spliced"): 3, _edits("not_worth_it"): 7, _edits("source_evicted"): 1},
            0.75,
        ),
        (
            ENGINE_PANEL,
            {
                _requests("spliced", "spliced"): 3,
                _requests("reprefilled", "nothing_to_reuse"): 7,
                _requests("reprefilled", "source_evicted"): 1,
                _requests("unedited", "none"): 9,
            },
            0.75,
        ),
    ],
)
def test_single_values(
    panel: str, per_minute: Mapping[str, int], expected: float, tmp_path: Path
) -> None:
    """A sum counts each of its series, and a share only what could have been spliced."""
    (expr,) = (query.expr for query in boards.queries() if query.name == panel)
    for variable, value in VARIABLES.items():
        expr = expr.replace(variable, value)
    case = {
        "interval": "1m",
        "input_series": [
            {"series": series, "values": f"0+{rate}x20"} for series, rate in per_minute.items()
        ],
        "promql_expr_test": [
            {
                "expr": f"round({expr}, 0.001)",
                "eval_time": "20m",
                "exp_samples": [{"labels": "{}", "value": expected}],
            }
        ],
    }
    path = tmp_path / "case.yml"
    path.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [case]}))
    promtool("test", "rules", path)
