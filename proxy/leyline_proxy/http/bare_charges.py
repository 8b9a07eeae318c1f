"""Budgets of requests without a session: bare completions, and other paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ..apis.prewarm import emptied
from ..budgets import Reservation
from ..errors import ProxyError
from ..tenants import Tenant
from ..turns.accounting import tokens_of_usage
from ..turns.prompt_size import members_size, text_size
from ..turns.settled import generated_tokens
from ..wiring.services import Services
from .refusal import refusal_of_event
from .relay import Relay
from .sse import DONE, ChunkFacts, chunk_facts, event_data, with_data


class BareCharge:
    """The reservation of one request, and its charge.

    Args:
        prompt: tokens of its prompt, roughly.
        answer: tokens that are held for its answer.
    """

    def __init__(
        self, services: Services, tenant: Tenant, model: str, *, prompt: int, answer: int
    ) -> None:
        self._services = services
        self._tenant = tenant
        self._model = model
        self._prompt = prompt
        self._answer = answer
        self._reservation: Reservation | None = None
        self.usage: Mapping[str, Any] | None = None
        """The engine's count, once there is one."""
        self.came = 0
        """Events with tokens so far."""
        self.reason: str | None = None
        """The reason for which an estimate is charged; None charges none."""
        self.whole = False
        """True if an estimate includes all that is held for the answer."""

    async def reserve(self) -> dict[str, str]:
        """Hold room, and return headers with what is left.

        Raises:
            BudgetExceededError, BudgetStoreDownError, UnpricedModelError: it must not be sent.
        """
        if not self._tenant.limits.budgets or not self._prompt + self._answer:
            return {}
        budgets = self._services.budgets
        amount = budgets.amount(
            self._tenant, self._model, prefilled=self._prompt, cached=0, generated=self._answer
        )
        self._reservation = await budgets.reserve(self._tenant, amount)
        return self._reservation.headers if self._reservation is not None else {}

    async def settle(self) -> None:
        """Charge what was used, once."""
        reservation, self._reservation = self._reservation, None
        if reservation is None:
            return
        told = tokens_of_usage(self.usage)
        written = generated_tokens(None, self.usage)
        prefilled, cached, generated = told.prefilled, told.served, written or 0
        if self.usage is not None or self.reason is not None or self.came:
            estimated = not told.prompt or written is None or (not written and self.came)
            if not told.prompt:
                prefilled = self._prompt
            if not written:
                generated = self._answer if self.whole and written is None else self.came
            if estimated:
                self._services.metrics.budget_estimates.labels(self.reason or "broken").inc()
        budgets = self._services.budgets
        amount = budgets.amount(
            self._tenant, self._model, prefilled=prefilled, cached=cached, generated=generated
        )
        await budgets.settle(reservation, amount)


class ChargedRelay(Relay):
    """Relays a bare completion, and charges it before its end is passed on.

    Args:
        prewarms: True if the client gets nothing of what was generated.
    """

    def __init__(self, charge: BareCharge, *, prewarms: bool = False) -> None:
        super().__init__()
        self._charge = charge
        self._prewarms = prewarms

    async def refusal(self, error: Mapping[str, Any]) -> ProxyError:
        """Return the error, with the field that a bare completion has."""
        return refusal_of_event(error, param="prompt")

    async def passed(self, event: bytes, facts: ChunkFacts) -> bytes:
        """Return the event."""
        if self._prewarms:
            event = with_data(event, emptied)
            facts = replace(chunk_facts(event), bears_token=False)
        self._charge.came += facts.bears_token
        if facts.usage is not None:
            self._charge.usage = facts.usage
        if event_data(event) == DONE:
            self._charge.reason = self._charge.reason or "no_usage"
            await self._charge.settle()
        return event


def prompt_tokens_of(body: Mapping[str, Any]) -> int:
    """Return the tokens of a bare completion's prompts: exactly for ids, else roughly. Other
    members that a model may read count, too."""
    return _tokens(body.get("prompt")) + members_size(body, but=("prompt", "stop"))


def usage_in(answer: bytes) -> Mapping[str, Any] | None:
    """Return the usage of a whole answer; None if it has none."""
    try:
        usage = msgspec.json.decode(answer, type=_Answer).usage
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return usage


class _Answer(msgspec.Struct):
    usage: dict[str, Any] | None = None


def _tokens(prompt: object) -> int:
    if isinstance(prompt, str):
        return text_size(prompt)
    if isinstance(prompt, Sequence):
        if {*map(type, prompt)} == {int}:  # a million of them, maybe
            return len(prompt)
        return sum(map(_tokens, prompt))
    if isinstance(prompt, Mapping):  # some engines take ids, or pictures, as members
        return sum(map(_tokens, prompt.values()))
    return int(isinstance(prompt, int | float))
