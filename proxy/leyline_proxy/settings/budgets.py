"""Settings of budgets: the tokens and the money that a tenant may use in a window of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..model.budgets import NANOS, Window, WindowLimit
from ..model.paid import Price
from .sessions import MEMORY, SessionSettings

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ModelPrice(BaseModel):
    """Prices of a million tokens of one model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    currency: Annotated[str, Field(pattern="^[A-Z]{3}$")]
    """Three letters of ISO 4217, such as ``USD``."""
    prefilled: Amount
    """Prompt tokens that are computed."""
    cached: Amount = 0.0
    """Prompt tokens that aren't; never more than ``prefilled``."""
    generated: Amount = 0.0
    """Tokens of answers."""

    @model_validator(mode="after")
    def _check_cached(self) -> ModelPrice:
        if self.cached > self.prefilled:
            raise ValueError("cached must not cost more than prefilled")
        return self

    def as_price(self) -> Price:
        """Return the price as the account uses it."""
        return Price(self.currency, self.prefilled, self.cached, self.generated)


class PriceSettings(BaseModel):
    """The price table."""

    prices: dict[str, ModelPrice] = Field(default_factory=dict)
    """Prices of a million tokens by model: ``currency``, ``prefilled``, ``cached`` and
    ``generated``. ``default`` holds for models without an own entry. With a price, answers and the
    live page show what lost tokens cost."""

    def price_of(self, model: str) -> Price | None:
        """Return the price of a model, or of the base of ``base:adapter``; None if it has none."""
        names = (model, model.partition(":")[0], "default")
        found = next((self.prices[name] for name in names if name in self.prices), None)
        return found.as_price() if found is not None else None


class Budget(BaseModel):
    """One budget."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    window: Window
    """``minute``, ``hour``, ``day`` or ``month`` of the calendar, in UTC."""
    tokens: Annotated[int, Field(ge=1, le=10**15)] | None = None
    """Tokens of prompts and answers, reused ones included."""
    money: Annotated[float, Field(gt=0, le=10**9)] | None = None
    """Amount in the currency of ``prices``."""

    @model_validator(mode="after")
    def _check_limit(self) -> Budget:
        if self.tokens is None and self.money is None:
            raise ValueError("a budget needs tokens, money or both")
        return self


class BudgetSettings(SessionSettings, PriceSettings):
    """Budgets, which may be in the sessions' Redis and use the price table."""

    budgets: tuple[Budget, ...] = ()
    """Budgets of each tenant without its own: ``window`` (``minute``, ``hour``, ``day`` or
    ``month`` in UTC), and ``tokens``, ``money`` or both. When one is used up, requests are refused
    (429) until its window ends."""
    budget_store: Literal["memory", "redis"] = "memory"
    """Place of the counts: ``memory``, which starts at 0 with the proxy, or ``redis`` for the Redis
    of ``session_store``, which several proxies share."""
    budget_store_down: Literal["open", "closed"] = "open"
    """How requests of tenants with a budget are handled while Redis can't be reached: ``open``
    admits them by what this process knows and counts, ``closed`` refuses them (503)."""
    budget_answer_tokens: Annotated[int, Field(ge=1)] = 4096
    """Tokens that a request reserves for its answer; fewer if its own limit is lower."""

    @model_validator(mode="after")
    def _check_budget_store(self) -> BudgetSettings:
        if self.budget_store == "redis" and self.session_store.get_secret_value() == MEMORY:
            raise ValueError(
                "budget_store: redis is the Redis of session_store, which is memory; give "
                "session_store the URL of a Redis"
            )
        return self

    def budget_currency(self) -> str:
        """Return the currency of money budgets; empty without prices."""
        return next((price.currency for price in self.prices.values()), "")


def check_money(settings: BudgetSettings, own: Mapping[str, Sequence[Budget] | None]) -> None:
    """Raise ValueError if a money budget has no price table, or one in several currencies.

    Args:
        own: budgets of tenants by name.
    """
    places = {"budgets": settings.budgets}
    places |= {f"tenants.{name}.budgets": tuple(each or ()) for name, each in own.items()}
    for place, budgets in places.items():
        if all(budget.money is None for budget in budgets):
            continue
        currencies = sorted({price.currency for price in settings.prices.values()})
        if not currencies:
            raise ValueError(f"{place} has money, which needs prices: give models their prices")
        if len(currencies) > 1:
            raise ValueError(
                f"{place} has money, so all prices must be in one currency, not in "
                f"{' and '.join(currencies)}"
            )


def window_limits(budgets: Sequence[Budget]) -> tuple[WindowLimit, ...]:
    """Return the limits of budgets, one for each window: the lowest of those given."""
    found: dict[Window, WindowLimit] = {}
    for budget in budgets:
        nanos = None if budget.money is None else round(budget.money * NANOS)
        limit = WindowLimit(budget.window, budget.tokens, nanos)
        known = found.get(budget.window)
        found[budget.window] = limit if known is None else known.lowest(limit)
    return tuple(found.values())
