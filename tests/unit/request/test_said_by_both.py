"""The ``leyline`` members of a block and of its message, as one."""

from __future__ import annotations

from typing import Any

import pytest

from leyline_proxy.request.annotations import said_by_both

CONDEMNED = {"verdict": "quarantine"}


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        ({"forget": True}, {"pin": True}, {"forget": True, "pin": True}),
        (CONDEMNED, {"pin": True}, {**CONDEMNED, "pin": True}),
        (CONDEMNED, {"verdict": "allow"}, CONDEMNED),
        ({"verdict": "allow"}, CONDEMNED, CONDEMNED),
        ({"verdict": "allow"}, {"pin": True}, {"pin": True}),
        ({**CONDEMNED, "forget": True}, {}, {**CONDEMNED, "forget": True}),
        ("wrong", CONDEMNED, "wrong"),
    ],
)
def test_no_demand_is_cancelled(first: Any, second: Any, both: Any) -> None:
    """The second one holds, beside a forget or a quarantine of either."""
    assert said_by_both(first, second) == both
