"""Refusals because of budgets. Each names only the caller's own budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ..errors import ForbiddenError, TryLaterError
from ..model.budgets import NANOS, Amount, Standing, Unit, tightest

_RELEASE_S = 2.0
"""Seconds until another try if only requests under way are in the way."""
_LONGEST_RETRY_S = 60
"""With more to wait, client libraries are told not to retry: some would sleep for a month."""


class BudgetExceededError(TryLaterError):
    """A budget has no room for the request.

    Args:
        short: the budget without room.
        found: all of the tenant's budgets, for the headers.
        wanted: what the request may need.
        now: seconds since 1970.
    """

    code = "budget_exceeded"

    def __init__(
        self,
        short: Standing,
        found: Sequence[Standing],
        wanted: Amount,
        *,
        currency: str,
        now: float,
    ) -> None:
        wait_s = max(1.0, short.period.ends - now)
        released = short.held > 0 and short.fits_once_released(wanted)
        super().__init__(
            _message(short, wanted, currency, released), _RELEASE_S if released else wait_s
        )
        self._short = short
        self._currency = currency
        self._rates = rate_headers(found, now)
        self._too_large = short.never_fits(wanted)
        self._hopeless = self._too_large or (not released and wait_s > _LONGEST_RETRY_S)

    @property
    def headers(self) -> dict[str, str]:
        when = {} if self._too_large else super().headers
        told = {"x-should-retry": "false"} if self._hopeless else {}
        return {**when, **told, **self._rates}

    @property
    def members(self) -> dict[str, Any]:
        return {"budget": standing_document(self._short, self._currency)}


class BudgetStoreDownError(TryLaterError):
    """Budgets can't be counted now, and the proxy is set to refuse requests then."""

    status = 503
    kind = "server_error"
    code = "budget_store_unavailable"

    def __init__(self, store: str) -> None:
        super().__init__(
            f"The store of budgets ({store}, budget_store) can't be reached, so nothing was sent. "
            "Try again later. With budget_store_down: open, the proxy admits requests meanwhile.",
            5.0,
        )


class UnpricedModelError(ForbiddenError):
    """A tenant with a money budget asks for a model without a price."""

    code = "model_without_price"

    def __init__(self) -> None:
        super().__init__(
            "This tenant has a money budget, and the model has no price. The operator can add the "
            "model, or default, to prices.",
            param="model",
        )


def rate_headers(found: Sequence[Standing], now: float) -> dict[str, str]:
    """Return the headers of OpenAI's and Anthropic's APIs for the tightest budget of tokens."""
    tight = tightest(found, "tokens")
    if tight is None:
        return {}
    limit, left = str(tight.limit), str(tight.remaining)
    return {
        "x-ratelimit-limit-tokens": limit,
        "x-ratelimit-remaining-tokens": left,
        "x-ratelimit-reset-tokens": _duration(tight.period.ends - now),
        "anthropic-ratelimit-tokens-limit": limit,
        "anthropic-ratelimit-tokens-remaining": left,
        "anthropic-ratelimit-tokens-reset": _time(tight),
    }


def standing_document(standing: Standing, currency: str) -> dict[str, Any]:
    """Return a budget's state as JSON; money in the currency."""
    money = standing.unit == "money"
    counts = {
        "limit": standing.limit,
        "used": standing.used,
        "reserved": standing.held,
        "remaining": standing.remaining,
    }
    shown: Mapping[str, float] = (
        {name: count / NANOS for name, count in counts.items()} if money else counts
    )
    return {
        "window": standing.period.window,
        "unit": standing.unit,
        **({"currency": currency} if money else {}),
        **shown,
        "resets_at": _time(standing),
    }


def _message(short: Standing, wanted: Amount, currency: str, released: bool) -> str:
    def shown(count: int) -> str:
        return _shown(short.unit, count, currency)

    need = shown(wanted.tokens if short.unit == "tokens" else wanted.nanos)
    budget = f"The budget of {shown(short.limit)} per {short.period.window}"
    if short.never_fits(wanted):
        return (
            f"{budget} is smaller than this request, which may need {need}. Shorten it, or lower "
            "its limit of answer tokens."
        )
    if not short.remaining and not released:
        return f"{budget} is used up. It resets at {_time(short)}."
    state = f"{budget} has {shown(short.remaining)} left, and this request may need {need}."
    if released:
        return f"{state} Requests under way hold the rest: try again when one has ended."
    return f"{state} It resets at {_time(short)}."


def _shown(unit: Unit, count: int, currency: str) -> str:
    return f"{count} tokens" if unit == "tokens" else f"{count / NANOS:.6g} {currency}"


def _time(standing: Standing) -> str:
    moment = datetime.fromtimestamp(standing.period.ends, UTC)
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


def _duration(seconds: float) -> str:
    """Return a time as OpenAI's headers write it: ``6m0s``."""
    minutes, rest = divmod(max(1, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
