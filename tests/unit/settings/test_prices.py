"""The price table."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from leyline_proxy.model.paid import Price
from leyline_proxy.settings import Settings

PLAIN = {"currency": "EUR", "prefilled": 2.0}


def test_a_model_has_its_own_price_or_the_default() -> None:
    """An adapter has its base's; without a default, other models have none."""
    prices: dict[str, Any] = {"big": {**PLAIN, "cached": 0.5, "generated": 8}, "big:law": PLAIN}
    settings = Settings(prices=prices)
    assert settings.price_of("big") == Price("EUR", 2.0, 0.5, 8.0)
    assert settings.price_of("big:tax") == settings.price_of("big")
    assert settings.price_of("big:law") == Price("EUR", 2.0, 0.0, 0.0)
    assert settings.price_of("small") is None
    with_default = Settings(prices={**prices, "default": {"currency": "USD", "prefilled": 1}})
    assert with_default.price_of("small") == Price("USD", 1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"cached": 3.0}, "cached must not cost more"),
        ({"prefilled": -1}, "prefilled"),
        ({"prefilled": float("inf")}, "prefilled"),
        ({"generated": float("nan")}, "generated"),
        ({"currency": "euro"}, "currency"),
        ({"per": "token"}, "per"),
    ],
)
def test_a_wrong_price_is_refused_by_name(wrong: dict[str, Any], where: str) -> None:
    """No negative, infinite or unknown amount gets into an account."""
    with pytest.raises(ValidationError, match=where):
        Settings(prices={"m": {**PLAIN, **wrong}})


def test_the_environment_has_prices_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole table is one variable."""
    monkeypatch.setenv("LEYLINE_PRICES", '{"m": {"currency": "EUR", "prefilled": 2}}')
    assert Settings().price_of("m") == Price("EUR", 2.0, 0.0, 0.0)
