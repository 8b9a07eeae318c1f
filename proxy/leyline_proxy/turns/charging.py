"""Reservations of turns in their tenants' budgets, and their charges.

A turn holds its prompt as if all of it were prefilled, and the longest answer that its own limit
or ``budget_answer_tokens`` allows. It is charged by the engine's counts. Without them it is charged
an estimate: the prompt as prefilled, and a token for each event that came with some; of a whole
answer whose client has left, as many as it held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from leyline_engine.contract import TokenCounts

from ..budgets import Budgets, Reservation
from ..budgets.errors import UnpricedModelError
from ..edits.policy_facts import reading_renderer, token_counter
from ..model.budgets import Amount
from ..request.prewarm import prewarms
from ..telemetry.metrics import Metrics
from .prompt_size import members_size, message_size
from .settled import SettledTurn, generated_tokens
from .turn import Turn

_MAX_ANSWERS = 1_000_000
"""Largest ``n`` that counts, so that sums stay within 64 bits. Engines refuse far fewer."""


_MOST = 10**15


class TurnCharges:
    """The budgets of turns.

    Args:
        answer_tokens: most that are held for an answer.
    """

    def __init__(self, budgets: Budgets, metrics: Metrics, *, answer_tokens: int) -> None:
        self.budgets = budgets
        """Where other requests are charged."""
        self._metrics = metrics
        self._answer_tokens = answer_tokens
        self._reservations: dict[str, Reservation] = {}
        """Reservations by the turn's name."""

    async def reserve(self, turn: Turn, *, forced: bool = False) -> dict[str, str]:
        """Hold room for a turn, and return headers with what is left.

        Args:
            forced: True for the rest of a request that has begun.

        Raises:
            BudgetExceededError, BudgetStoreDownError, UnpricedModelError: it must not be sent.
        """
        request = turn.request
        if not request.tenant.limits.budgets:
            return {}
        amount = self._amount(turn, answer=self.answer_room(request.body))
        reservation = await self.budgets.reserve(request.tenant, amount, forced=forced)
        if reservation is None:
            return {}
        self._reservations[turn.name] = reservation
        return reservation.headers

    def answer_room(self, body: Mapping[str, Any]) -> int:
        """Return the tokens that a chat request holds for its answers."""
        if prewarms(body):
            return 0
        # Engines obey one of two limits, and not all the same one.
        limits = _counts(body, "max_completion_tokens", "max_tokens")
        return self._room(limits, max(_counts(body, "n"), default=1) or 1)

    def completion_room(self, body: Mapping[str, Any]) -> int:
        """Return the tokens that a bare completion holds for the answers to its prompts."""
        if prewarms(body):
            return 0
        answers = max(_counts(body, "n", "best_of"), default=1) or 1
        prompt = body.get("prompt")
        several = isinstance(prompt, Sequence) and not isinstance(prompt, str)
        prompts = len(prompt) if several and prompt and not isinstance(prompt[0], int) else 1
        return self._room(_counts(body, "max_tokens"), answers * prompts)

    def _room(self, limits: Sequence[int], answers: int) -> int:
        # What can't be read as a limit may be none.
        longest = self._answer_tokens if not all(limits) else max(limits, default=_MOST)
        return min(longest, self._answer_tokens) * min(answers, _MAX_ANSWERS)

    async def settled(self, settled: SettledTurn) -> None:
        """Charge a turn that was answered."""
        turn = settled.turn
        reservation = self._reservations.pop(turn.name, None)
        if reservation is None and not turn.request.tenant.limits.budgets:
            return
        if reservation is not None:
            await self.budgets.settle(reservation, self._used(settled))
            return
        # A policy's question, which no caller could be refused for.
        with suppress(UnpricedModelError):
            await self.budgets.charge(turn.request.tenant, self._used(settled))

    async def abandoned(self, turn: Turn, *, client_left: bool) -> None:
        """Charge a turn without an account: its client has left, or its answer broke off.

        An engine that failed before it answered is charged to nobody.
        """
        reservation = self._reservations.pop(turn.name, None)
        if reservation is None:
            return
        clock, used = turn.request.clock, Amount()
        if client_left or clock.tokens:
            whole = client_left and not turn.request.stream
            answer = self.answer_room(turn.request.body) if whole else clock.tokens
            used = self._amount(turn, answer=answer)
            self._metrics.budget_estimates.labels("left" if client_left else "broken").inc()
        await self.budgets.settle(reservation, used)

    async def released(self, turn: Turn) -> None:
        """Give back what a turn holds that was neither answered nor abandoned."""
        reservation = self._reservations.pop(turn.name, None)
        if reservation is not None:
            await self.budgets.settle(reservation, Amount())

    def _used(self, settled: SettledTurn) -> Amount:
        turn, tokens = settled.turn, settled.receipt.tokens
        generated = generated_tokens(settled.record, settled.usage)
        came = turn.request.clock.tokens
        if not generated and came and settled.usage is not None:
            generated = None  # an engine that reports none of those that came
        if not tokens.prompt or generated is None:
            self._metrics.budget_estimates.labels("no_usage").inc()
        if generated is None:
            generated = came
        return self._amount(turn, tokens if tokens.prompt else None, answer=generated)

    def _amount(self, turn: Turn, tokens: TokenCounts | None = None, *, answer: int) -> Amount:
        """Return what a turn counts.

        Args:
            tokens: of its prompt; None for an estimate.
        """
        prefilled = prompt_size(turn) if tokens is None else tokens.prefilled
        return self.budgets.amount(
            turn.request.tenant,
            turn.request.model,
            prefilled=prefilled,
            cached=0 if tokens is None else tokens.prompt - tokens.prefilled,
            generated=answer,
        )


def prompt_size(turn: Turn) -> int:
    """Return the tokens of a turn's prompt; if it can't be rendered here, an approximate number,
    which includes all that the engine may write into it."""
    if turn.planned.rendered is not None and turn.planned.rendered.tokens:
        return len(turn.planned.rendered.tokens)
    renderer = reading_renderer(turn.status, turn.request)
    count = token_counter(renderer) if renderer is not None else None
    sizes = (message_size(each, count) for each in turn.planned.prepared.messages)
    return sum(sizes) + members_size(turn.request.body, but=("messages",))


def _counts(body: Mapping[str, Any], *names: str) -> list[int]:
    """Return the numbers among members of a body, in any spelling that an engine may read."""
    given = (body.get(name) for name in names)
    return [_count(each) for each in given if each is not None]


def _count(value: object) -> int:
    """Return a number; 0 for what is none, or not positive."""
    try:
        number = float(value) if isinstance(value, int | float | str) else 0.0
        return max(0, int(min(number, _MOST)))
    except (ValueError, OverflowError):  # also not a number
        return 0
