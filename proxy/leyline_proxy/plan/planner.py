"""Planning of turns: off the event loop if a thread is worth it, and with tokens from the engine if
a prompt can't be rendered here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import structlog

from leyline_engine.contract import TOKENS_PATH

from ..admission.turn_threads import TurnThreads
from ..edits.editing import Edited
from ..edits.editor import Editor
from ..edits.policy_facts import reading_renderer, token_counter
from ..errors import ProxyError, UnsupportedError, UpstreamUnreachableError
from ..model.messages import has_media
from ..model.prepared import Prepared, Quarantined
from ..request.context_management import CONTEXT_FIELD, applied_edits
from ..telemetry.logging import frames_of
from ..telemetry.metrics import Metrics
from ..upstream.replica import Replica
from ..upstream.tokens import TokensRefusedError, tokens_of
from .draft import Draft, LongPromptError, draft_turn
from .plan_input import PlanInput
from .planning import Planned, plan_turn
from .reaching import with_reach
from .verdicts import found_verdicts, standing_verdicts

log = structlog.get_logger("leyline.turn")

INLINE_BYTES = 32 * 1024
"""Largest body that is planned on the event loop if no policy runs; a thread would cost more.

A policy can take any time, on a body of any size.
"""

T = TypeVar("T")


class Planner:
    """Edits, renders and plans turns.

    Args:
        threads: where it works, unless a turn is small and without policies.
        verdict_key: keys the hashes by which messages in quarantine are known again.
    """

    def __init__(
        self,
        metrics: Metrics,
        editor: Editor,
        threads: TurnThreads | None = None,
        *,
        verdict_key: bytes = b"",
    ) -> None:
        self._threads = threads or TurnThreads()
        self._verdict_key = verdict_key
        self._metrics = metrics
        self._editor = editor

    async def plan(self, given: PlanInput, session_id: str, replica: Replica) -> Planned:
        """Return a turn's messages and the request to the engine.

        Args:
            replica: the engine, which may be asked for tokens that can't be made here.

        Raises:
            PolicyFailedClosedError, BadRequestError: the request must not be sent.
        """
        return await self._drafted(given, partial(self._draft, given, session_id), replica)

    async def plan_edited(self, given: PlanInput, prepared: Prepared, replica: Replica) -> Planned:
        """Return the request to the engine for messages that are edited already."""

        def draft() -> Draft:
            return draft_turn(given, Edited(prepared), self._metrics)

        planned = await self._drafted(given, draft, replica)
        return replace(planned, verdicts=())  # the turn that edited them brought these

    async def _drafted(
        self, given: PlanInput, draft_of: Callable[[], Draft], replica: Replica
    ) -> Planned:
        inline = not given.policies and len(given.request.raw) <= INLINE_BYTES
        work = partial(self._planned, given, draft_of)
        draft, planned = await self._worked(given, work, inline=inline)
        if planned is not None:
            return planned
        with given.request.clock.waiting():
            tokens = await self._tokens(draft, given, replica)
        plan = partial(self._plan, given, draft, tokens)
        return await self._worked(given, plan, inline=inline)

    async def _worked(self, given: PlanInput, work: Callable[[], T], *, inline: bool = False) -> T:
        return work() if inline else await self._threads.run(given.request.tenant, work)

    def _planned(
        self, given: PlanInput, draft_of: Callable[[], Draft]
    ) -> tuple[Draft, Planned | None]:
        """Return the draft, and also the plan unless the engine must be asked first."""
        draft = draft_of()
        return draft, self._plan(given, draft) if draft.question is None else None

    def _plan(self, given: PlanInput, draft: Draft, tokens: Sequence[int] | None = None) -> Planned:
        planned = plan_turn(given, draft, self._metrics, tokens)
        verdicts = found_verdicts(
            given, planned.prepared, planned.names, draft.standing, self._verdict_key
        )
        planned = replace(planned, verdicts=verdicts)
        try:
            return with_reach(given, planned)
        except Exception as error:  # a fault in here costs the account of busts
            log.error("reach_failed", error=type(error).__name__, frames=frames_of(error))
            return planned

    async def count(
        self, given: PlanInput, session_id: str | None, replica: Replica
    ) -> dict[str, Any]:
        """Return the prompt tokens of an unsent turn, before and after its edits. Text that must
        not reach the engine is left out of both. The number before is None if only the edits make
        the prompt one that the engine takes, or that can be counted.

        Args:
            session_id: None for an unknown session.

        Raises:
            LongPromptError: the prompt can't fit into the context.
            UpstreamFailedError: the engine is needed for it, and can't be reached.
            TokensRefusedError: the engine refuses the request.
            UnsupportedError: the tokens can't be counted.
            PolicyFailedClosedError, BadRequestError: the request must not be sent.
        """
        work = partial(self._draft, given, session_id, runs=False)
        draft = await self._worked(given, work)
        counted: dict[str, Any] = {"input_tokens": await self._prompt_tokens(given, draft, replica)}
        if given.policies:
            work = partial(self._draft, given, None, only_forgets=True, runs=False)
            original = await self._worked(given, work)
            before: int | None = None
            with suppress(ProxyError, TokensRefusedError):
                before = await self._prompt_tokens(given, original, replica)
            counted[CONTEXT_FIELD] = {
                "original_input_tokens": before,
                "applied_edits": self.applied(given, draft.edited.prepared),
            }
        return counted

    def applied(self, given: PlanInput, prepared: Prepared) -> list[dict[str, Any]]:
        """Return the effects of the edits that the request asked for in ``context_management``."""
        requested = {policy.name: policy for policy in given.request.requested}
        count = token_counter(reading_renderer(given.status, given.request))
        return applied_edits(prepared, requested, count) if requested else []

    def _draft(
        self,
        given: PlanInput,
        session_id: str | None,
        *,
        only_forgets: bool = False,
        runs: bool = True,
    ) -> Draft:
        standing = standing_verdicts(given, self._verdict_key)
        condemned = {place: Quarantined(each.policy, each.why) for place, each in standing.items()}
        asked = replace(given.edits, condemned=condemned)
        edited = self._editor.edit(asked, session_id, only_forgets=only_forgets)
        return replace(draft_turn(given, edited, self._metrics, runs=runs), standing=standing)

    async def _prompt_tokens(self, given: PlanInput, draft: Draft, replica: Replica) -> int:
        """Return the number of a prompt's tokens. Raises as :meth:`count`."""
        if draft.rendered is not None:
            return len(draft.rendered.tokens)
        capability, path = given.status.capability, given.status.rendering.tokens_path
        if draft.size is not None and capability is not None:
            raise LongPromptError(draft.size, capability.max_context)
        if draft.question is None and not given.status.up:
            raise UpstreamUnreachableError(f"The engine is down: {given.status.problem}")
        if draft.question is None:
            raise _uncountable("this engine's chat template isn't known here")
        tokens = await self._asked(draft.question, path, replica)
        if tokens is None:
            raise _uncountable("this engine doesn't report them")
        if path != TOKENS_PATH and has_media(draft.edited.prepared.messages):
            # There, a picture is one token of the template, whatever it takes in the prompt.
            raise _uncountable("this engine doesn't report how many its pictures or sounds take")
        return len(tokens)

    async def _tokens(self, draft: Draft, given: PlanInput, replica: Replica) -> list[int] | None:
        """Return the engine's own tokens of a prompt, or None."""
        if draft.question is not None:
            with suppress(ProxyError, TokensRefusedError):
                path = given.status.rendering.tokens_path
                return await self._asked(draft.question, path, replica)
        return None

    async def _asked(
        self, question: Mapping[str, Any], path: str, replica: Replica
    ) -> list[int] | None:
        """Return the engine's answer to a question for tokens. Raises as :func:`tokens_of`."""
        with self._metrics.stage("ask"):
            try:
                return await tokens_of(replica.client, question, path)
            except ProxyError:
                replica.handshake.report_failure()
                raise


def _uncountable(why: str) -> UnsupportedError:
    return UnsupportedError(f"Prompt tokens can't be counted: {why}.")
