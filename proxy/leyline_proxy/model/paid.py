"""The reasons for which a turn's prompt tokens were prefilled. Numbers and names, no text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

MAX_BUSTS = 16
"""Largest number of entries of a turn; the last one sums those that are too many."""

OTHERS = "others"
"""Cause of that entry."""

_MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Price:
    """Prices of a million tokens."""

    currency: str
    prefilled: float
    cached: float
    """Of prompt tokens that were not prefilled."""
    generated: float

    def of_lost(self, tokens: int) -> float:
        """Return what lost tokens cost more than cached ones."""
        return tokens * (self.prefilled - self.cached) / _MILLION

    def of_turn(self, prefilled: int, cached: int, generated: int) -> float:
        """Return the price of a turn."""
        tokens = (prefilled, cached, generated)
        prices = (self.prefilled, self.cached, self.generated)
        return sum(map(float.__mul__, map(float, tokens), prices)) / _MILLION


class Origin(NamedTuple):
    """The change that tokens were lost to, and why no splice saved them."""

    cause: str
    message: int | None = None
    """Index of the changed message in the caller's list."""
    role: str = ""
    tool: str = ""
    """Name of the tool that the changed message calls, or is the result of."""
    mode: str = ""
    """Mode of the edit; empty if no edit is to blame."""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Bust:
    """Lost tokens of one origin."""

    origin: Origin
    tokens: int
    at: int | None
    """Place of the first one in the prompt; None if unknown."""
    messages: tuple[int, int] | None
    """First and last message of the caller's list that hold some; None if unknown."""
    entries: int = 1
    """Number of origins."""


@dataclass(frozen=True, slots=True)
class Paid:
    """A turn's prefilled tokens by reason; lost and new ones add up to all."""

    compared: str
    """Name of the retained turn that the prompt was compared with; empty if there was none."""
    estimated: bool
    """True if only messages were compared."""
    lost: int
    new: int
    cached: int
    """Prompt tokens that were not prefilled."""
    generated: int | None
    """Tokens of the answer; None if the engine doesn't report them."""
    busts: tuple[Bust, ...]
    """The lost tokens by origin, the most first."""
    prefill_us: float | None
    """Measured microseconds per prefilled token of this engine; None if unknown."""
    price: Price | None
    """None if the model has none."""
    thinking: tuple[int, int] = (0, 0)
    """Tokens after thinking that the template stripped: those copied, which ``exact`` would have
    prefilled, and those prefilled, which ``amortize`` would have copied."""


def largest(busts: Sequence[Bust]) -> tuple[Bust, ...]:
    """Return busts by size, those that are too many as one."""
    ranked = sorted(busts, key=lambda bust: (-bust.tokens, bust.at or 0))
    if len(ranked) <= MAX_BUSTS:
        return tuple(ranked)
    kept, rest = ranked[: MAX_BUSTS - 1], ranked[MAX_BUSTS - 1 :]
    tokens = sum(bust.tokens for bust in rest)
    return (*kept, Bust(Origin(OTHERS), tokens, None, None, entries=len(rest)))


def paid_account(paid: Paid | None, *, entries: bool = True) -> dict[str, Any] | None:
    """Return the account of a turn's busts; None if the engine's counts aren't known.

    Args:
        entries: False for the sums alone.
    """
    if paid is None:
        return None
    account: dict[str, Any] = {
        "compared_with": paid.compared or None,
        "estimated": paid.estimated,
        "lost_tokens": paid.lost,
        "new_tokens": paid.new,
        "lost_seconds": _seconds(paid, paid.lost),
        "prefill_us_per_token": paid.prefill_us,
        "thinking": dict(zip(("kept", "lost"), paid.thinking, strict=True)),
    }
    if paid.price is not None:
        prefilled = paid.lost + paid.new
        account["money"] = {
            "currency": paid.price.currency,
            "lost": paid.price.of_lost(paid.lost),
            "turn": paid.price.of_turn(prefilled, paid.cached, paid.generated)
            if paid.generated is not None
            else None,
        }
    if entries:
        account["entries"] = [_entry(paid, bust) for bust in paid.busts]
    return account


def _entry(paid: Paid, bust: Bust) -> dict[str, Any]:
    origin = bust.origin
    entry: dict[str, Any] = {
        "cause": origin.cause,
        "message": origin.message,
        "role": origin.role or None,
        "tool": origin.tool or None,
        "mode": origin.mode or None,
        "why": origin.why or None,
        "tokens": bust.tokens,
        "at": bust.at,
        "messages": list(bust.messages) if bust.messages is not None else None,
        "seconds": _seconds(paid, bust.tokens),
    }
    if bust.entries > 1:
        entry["entries"] = bust.entries
    if paid.price is not None:
        entry["money"] = paid.price.of_lost(bust.tokens)
    return entry


def _seconds(paid: Paid, tokens: int) -> float | None:
    return None if paid.prefill_us is None else tokens * paid.prefill_us / _MILLION
