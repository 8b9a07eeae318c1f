"""The doctor's look at budgets."""

from __future__ import annotations

from typing import Any

import pytest

from leyline_proxy.doctor.budgets import examine_budgets
from leyline_proxy.doctor.findings import Status
from leyline_proxy.settings import Settings

DAY, HOUR = {"window": "day", "tokens": 5}, {"window": "hour", "tokens": 5}
MONEY = {"window": "hour", "money": 5.0}
EURO = {"currency": "EUR", "prefilled": 2.0}
REDIS = {"budget_store": "redis", "session_store": "redis://r/0", "hints_secret": "h" * 16}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [(Status.SKIP, "no tenant has a budget")]),
        ({"budgets": [HOUR]}, [(Status.OK, "counted in memory")]),
        ({"budgets": [DAY]}, [(Status.WARN, "starts at 0 with each start")]),
        ({"tenants": {"red": {"budgets": [DAY]}}}, [(Status.WARN, "starts at 0 with each start")]),
        ({"budgets": [DAY], **REDIS}, [(Status.OK, "counted in redis")]),
        (
            {"budgets": [MONEY], "prices": {"big": EURO}},
            [(Status.WARN, "other models than those in prices are refused")],
        ),
        ({"budgets": [MONEY], "prices": {"default": EURO}}, [(Status.OK, "counted in memory")]),
    ],
)
def test_budgets_that_a_restart_ends_or_that_refuse_models_are_named(
    settings: dict[str, Any], expected: list[tuple[Status, str]]
) -> None:
    """Each warning says what to set."""
    found = examine_budgets(Settings(**settings))
    assert len(found) == len(expected)
    for finding, (status, words) in zip(found, expected, strict=True):
        assert finding.status is status
        assert words in finding.detail
        assert bool(finding.fix) is (status is Status.WARN)
