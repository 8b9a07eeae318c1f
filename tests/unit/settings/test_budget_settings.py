"""Settings of budgets, and what is wrong with them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from leyline_proxy.model.budgets import WindowLimit
from leyline_proxy.settings import Settings, load_settings
from leyline_proxy.settings.budgets import window_limits
from leyline_proxy.tenants import build_directory

EURO = {"currency": "EUR", "prefilled": 2.0}
MONTH = {"window": "month", "money": 1.5}
FILE = """
prices:
  default: {currency: EUR, prefilled: 2.0}
budgets:
  - {window: day, tokens: 100}
tenants:
  red:
    budgets: [{window: month, money: 1.5}, {window: day, tokens: 7}, {window: day, tokens: 9}]
  free:
    budgets: []
  other: {}
"""


def test_a_tenants_budgets_replace_the_proxys(tmp_path: Path) -> None:
    """Of several in one window the lowest holds; an empty list is none."""
    path = tmp_path / "leyline.yaml"
    path.write_text(FILE)
    settings = load_settings(path)
    directory = build_directory(settings)
    found = {}
    for name in ("red", "free", "other"):
        tenant = directory.get(name)
        assert tenant is not None
        found[name] = tenant.limits.budgets
    assert found["red"] == (
        WindowLimit("month", nanos=1_500_000_000),
        WindowLimit("day", tokens=7),
    )
    assert found["free"] == ()
    assert found["other"] == (WindowLimit("day", tokens=100),)
    assert settings.budget_currency() == "EUR"


def test_settings_of_a_file_reach_workers(tmp_path: Path) -> None:
    """They can be pickled, and are the same after it, with what was set."""
    path = tmp_path / "leyline.yaml"
    path.write_text(FILE)
    read = load_settings(path, port=1234)
    copied = pickle.loads(pickle.dumps(read))  # noqa: S301 - its own
    assert copied == read
    assert type(copied) is Settings
    assert (copied.port, copied.tenants["red"].budgets) == (1234, read.tenants["red"].budgets)
    assert copied.model_fields_set == {"prices", "budgets", "tenants", "port"}


def test_budgets_come_from_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is JSON, like other nested settings."""
    monkeypatch.setenv("LEYLINE_BUDGETS", '[{"window": "hour", "tokens": 5}]')
    assert window_limits(Settings().budgets) == (WindowLimit("hour", tokens=5),)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"budgets": [{"window": "day"}]}, "needs tokens, money or both"),
        ({"budgets": [{"window": "week", "tokens": 1}]}, "minute"),
        ({"budgets": [{"window": "day", "tokens": 0}]}, "tokens"),
        ({"budgets": [{"window": "day", "tokens": 1, "money": 0}]}, "money"),
        ({"budgets": [{"window": "day", "money": float("inf")}]}, "money"),
        ({"budgets": [{"window": "day", "tokens": 1, "euros": 2}]}, "euros"),
        ({"budgets": [MONTH]}, "budgets has money, which needs prices"),
        ({"tenants": {"red": {"budgets": [MONTH]}}}, "tenants.red.budgets has money"),
        (
            {"budgets": [MONTH], "prices": {"a": EURO, "b": {**EURO, "currency": "USD"}}},
            "one currency, not in EUR and USD",
        ),
        ({"budget_store": "redis"}, "session_store, which is memory"),
        ({"budget_store_down": "ajar"}, "budget_store_down"),
        ({"budget_answer_tokens": 0}, "budget_answer_tokens"),
    ],
)
def test_a_wrong_budget_is_refused_by_name(wrong: dict[str, Any], words: str) -> None:
    """No proxy starts with a budget that it can't keep."""
    with pytest.raises(ValidationError, match=words):
        Settings(**wrong)


def test_several_currencies_do_no_harm_without_money() -> None:
    """Budgets of tokens need no prices, and don't look at them."""
    prices = {"a": EURO, "b": {**EURO, "currency": "USD"}}
    assert Settings(budgets=[{"window": "day", "tokens": 1}], prices=prices).budgets
