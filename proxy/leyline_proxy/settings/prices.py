"""Prices of models, by which lost tokens are counted as money."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..model.paid import Price

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
