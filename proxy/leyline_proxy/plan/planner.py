"""Planning of turns: off the event loop if a thread is worth it, and with tokens from the engine if
a prompt can't be rendered here."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import anyio.to_thread
import structlog

from leyline_engine.contract import Receipt
from leyline_policies.builtin.redact import Redact
from leyline_policies.faults import OnFault

from ..edits.costs import CostBook
from ..edits.policy_facts import PolicyMemos, policy_session, renderer_of, token_counter
from ..edits.schedule import Timing
from ..edits.sensitive import sensitive_rule
from ..edits.time_limit import TimeLimit
from ..errors import ProxyError, UnsupportedError
from ..model.messages import Message
from ..model.prepared import Prepared
from ..request.context_management import CONTEXT_FIELD, applied_edits
from ..telemetry.logging import frames_of
from ..telemetry.metrics import Metrics
from ..upstream.replica import Replica
from .planning import (
    Draft,
    PlanInput,
    Planned,
    draft_turn,
    plan_turn,
    prepare_turn,
    prompt_question,
)
from .reaching import with_reach

log = structlog.get_logger("leyline.turn")

INLINE_BYTES = 32 * 1024
"""Largest body that is planned on the event loop if no policy runs; a thread would cost more.

A policy can take any time, on a body of any size.
"""

T = TypeVar("T")


class Planner:
    """Steps 2 to 5 of turns, and the costs learned from their ends.

    Args:
        timing: rules for waiting edits; None if none waits.
        sensitive: content that is forgotten whichever policy removes it.
        on_fault: action after a fault of a policy that forgets.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        policy_timeout_s: float,
        timing: Timing | None,
        sensitive: Redact | None,
        on_fault: OnFault = "refuse",
    ) -> None:
        self._metrics = metrics
        self._on_fault = on_fault
        self._timing = timing
        self._sensitive = sensitive
        self._memos = PolicyMemos()
        self._costs: defaultdict[str, CostBook] = defaultdict(CostBook)
        self._time_limit = TimeLimit(policy_timeout_s)

    async def plan(self, given: PlanInput, session_id: str, replica: Replica) -> Planned:
        """Return a turn's messages and the request to the engine.

        Args:
            replica: the engine, which may be asked for tokens that can't be made here.

        Raises:
            PolicyFailedClosedError, BadRequestError: the request must not be sent.
        """
        inline = not given.policies and len(given.request.raw) <= INLINE_BYTES
        draft, planned = await _worked(inline, partial(self._planned, given, session_id))
        if planned is not None:
            return planned
        question = prompt_question(given, draft)
        with given.request.clock.waiting():
            tokens = await self._tokens(question, replica) if question is not None else None
        return await _worked(inline, partial(self._plan, given, draft, tokens))

    def _planned(self, given: PlanInput, session_id: str) -> tuple[Draft, Planned | None]:
        """Return the draft, and also the plan unless the engine must be asked first."""
        draft = self._draft(given, session_id)
        asks = prompt_question(given, draft) is not None
        return draft, None if asks else self._plan(given, draft)

    def _plan(self, given: PlanInput, draft: Draft, tokens: Sequence[int] | None = None) -> Planned:
        planned = plan_turn(given, draft, self._metrics, tokens)
        try:
            return with_reach(given, planned)
        except Exception as error:  # a fault in here costs the account of busts
            log.error("reach_failed", error=type(error).__name__, frames=frames_of(error))
            return planned

    async def count(
        self, given: PlanInput, session_id: str | None, replica: Replica
    ) -> dict[str, Any]:
        """Return the prompt tokens of an unsent turn, before and after its edits. Text that must
        not reach the engine is left out of both.

        Args:
            session_id: None for an unknown session.

        Raises:
            UnsupportedError: the engine's chat template isn't known, so tokens can't be counted.
            PolicyFailedClosedError, BadRequestError: the request must not be sent.
        """
        draft = await _worked(False, partial(self._draft, given, session_id))
        counted: dict[str, Any] = {"input_tokens": await self._prompt_tokens(given, draft, replica)}
        if given.policies:
            work = partial(self._draft, given, None, only_forgets=True)
            original = await _worked(False, work)
            counted[CONTEXT_FIELD] = {
                "original_input_tokens": await self._prompt_tokens(given, original, replica),
                "applied_edits": self.applied(given, draft.prepared),
            }
        return counted

    async def searched(self, given: PlanInput) -> list[Message]:
        """Return the messages of a request that isn't a turn, less the text that policies forget.

        Raises:
            PolicyFailedClosedError, BadRequestError: the request must not be sent.
        """
        work = partial(self._with_policies, given, None, prepare_turn, only_forgets=True)
        prepared, _ = await _worked(False, work)
        return prepared.messages

    def applied(self, given: PlanInput, prepared: Prepared) -> list[dict[str, Any]]:
        """Return the effects of the edits that the request asked for in ``context_management``."""
        requested = {policy.name: policy for policy in given.request.requested}
        count = token_counter(renderer_of(given.status, given.request.model))
        return applied_edits(prepared, requested, count) if requested else []

    def avoided_s(self, model: str, receipt: Receipt) -> float:
        """Estimate the seconds saved: prefilling the spliced tokens, less the splice. 0 until a
        turn gives a cost.

        Args:
            model: as a label.
        """
        book, spliced = self._costs.get(model), receipt.tokens.spliced
        if book is None or not spliced:
            return 0.0
        prefill_us = book.cost(splices=True).prefill_us
        return max(0.0, spliced * prefill_us - receipt.splice_us) / 1e6

    def learn(self, model: str, receipt: Receipt, ttft_s: float | None) -> None:
        """Record the cost of a turn.

        Args:
            model: as a label; there are few.
            ttft_s: seconds from sending it to the first token of a streamed answer.
        """
        self._costs[model].learn(receipt, ttft_s)

    def _draft(
        self, given: PlanInput, session_id: str | None, *, only_forgets: bool = False
    ) -> Draft:
        return self._with_policies(given, session_id, draft_turn, only_forgets=only_forgets)

    def _with_policies(
        self,
        given: PlanInput,
        session_id: str | None,
        work: Callable[[PlanInput, Metrics], T],
        *,
        only_forgets: bool = False,
    ) -> T:
        """Do a step with the facts for policies."""
        request, status = given.request, given.status
        if not given.policies and not request.annotations:
            return work(given, self._metrics)
        book = self._costs.get(request.model) or CostBook()
        renderer = renderer_of(status, request.model)
        with self._memos.of(request.tenant.name, session_id, given.policies, renderer) as memo:
            facts = policy_session(
                given.session,
                status,
                request.model,
                cost=book.cost(splices=status.splices),
                memo=memo,
                limit=partial(self._time_limit, request.tenant.name),
                sensitive=sensitive_rule(self._sensitive, memo),
                on_fault=self._on_fault,
                now=time.time(),
            )
            facts = replace(facts, only_forgets=only_forgets)
            # Edits that a request asks for don't wait.
            timing = None if request.requested or only_forgets else self._timing
            given = replace(given, policy_session=facts, timing=timing)
            return work(given, self._metrics)

    async def _prompt_tokens(self, given: PlanInput, draft: Draft, replica: Replica) -> int:
        if draft.rendered is not None:
            return len(draft.rendered.tokens)
        question = prompt_question(given, draft)
        tokens = await self._tokens(question, replica) if question is not None else None
        if tokens is None:
            raise UnsupportedError(
                "Prompt tokens can't be counted: this engine's chat template isn't known here."
            )
        return len(tokens)

    async def _tokens(self, question: Mapping[str, Any], replica: Replica) -> list[int] | None:
        """Return the engine's own tokens of a prompt, or None."""
        with self._metrics.stage("ask"):
            try:
                return await replica.client.tokenize(question)
            except ProxyError:
                replica.handshake.report_failure()
                return None


async def _worked(inline: bool, work: Callable[[], T]) -> T:
    return work() if inline else await anyio.to_thread.run_sync(work)
