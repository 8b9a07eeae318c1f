"""Planning of turns: off the event loop if a thread is worth it, and with tokens from the engine if
a prompt can't be rendered here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import structlog

from leyline_engine.contract import TOKENS_PATH, Recompute
from leyline_policies.verbs import QUARANTINE

from ..admission.turn_threads import TurnThreads
from ..edits.editing import Edited
from ..edits.editor import Editor
from ..edits.policy_facts import reading_renderer, token_counter
from ..edits.prepare import unedited
from ..errors import BadRequestError, ProxyError, UnsupportedError, UpstreamUnreachableError
from ..model.messages import has_media
from ..model.prepared import Prepared, Quarantined
from ..model.session import RetainedTurn
from ..model.spans import SpanNames
from ..model.verdicts import MAX_VERDICTS, Verdict, VerdictIndex, demanded, keyed_print
from ..render import steering_digest
from ..request.context_management import CONTEXT_FIELD, applied_edits
from ..telemetry.logging import frames_of
from ..telemetry.metrics import Metrics
from ..upstream.replica import Replica
from ..upstream.tokens import TokensRefusedError, tokens_of
from .candidates import consider, quoting
from .draft import Draft, LongPromptError, draft_turn
from .naming import name_spans
from .plan_input import PlanInput
from .planning import Planned, decode_of, edited_by_messages, plan_turn
from .quotes import find_quotes
from .reach import Moved, Reach, reach_by_messages, reach_of

_ALLOW = "allow"


def standing_verdicts(given: PlanInput, key: bytes) -> Mapping[int, Verdict]:
    """Return the verdicts of earlier turns on this turn's messages, by index in the client's list.

    The caller's ``allow`` lifts a policy's verdict, not a verdict of the caller's own.

    Raises:
        BadRequestError: the request has more verdicts than the session may have.
    """
    session, request = given.session, given.request
    found: dict[int, Verdict] = {}
    if session is not None and session.verdicts:
        index = VerdictIndex(session.verdicts)
        client = unedited(request.messages, request.fingerprints)
        # The newest list suffices: an older text that returns is found by its hash.
        last = (session.last,) if session.last is not None else ()
        names = name_spans(given.turn, client, last, session.departed, None).client
        for place, value in enumerate(request.fingerprints):
            verdict = index.find(names[place], keyed_print(value, key))
            said = request.annotations.get(place)
            lifted = said is not None and said.verdict == _ALLOW
            if verdict is not None and not (lifted and verdict.by == "policy"):
                found[place] = verdict
    _check_room(given, found)
    return found


def found_verdicts(
    given: PlanInput,
    prepared: Prepared,
    names: SpanNames | None,
    standing: Mapping[int, Verdict],
    key: bytes,
) -> tuple[Verdict, ...]:
    """Return the verdicts on all messages that the turn has in quarantine.

    Args:
        names: of the turn's messages; None if unknown.
        standing: those of earlier turns.
    """
    found: list[Verdict] = []
    for place, (policy, why) in sorted(prepared.quarantined.items()):
        known, said = standing.get(place), given.request.annotations.get(place)
        own = names.client[place].id if names is not None else f"{given.turn}.{place}"
        is_said = said is not None and said.verdict == QUARANTINE
        found.append(
            Verdict(
                spans=(own,) if known is None else (known.span, own),
                prints=(keyed_print(prepared.client_fingerprints[place], key),),
                policy=policy,
                why=why,
                by="annotation" if is_said else "policy",
                turn=given.turn,
                message=place,
                role=str(prepared.client[place].get("role", "")),
            )
        )
    return tuple(found)


def _check_room(given: PlanInput, standing: Mapping[int, Verdict]) -> None:
    """Refuse verdicts that the session could not remember."""
    new = [
        place
        for place, said in given.request.annotations.items()
        if said.verdict == QUARANTINE and place not in standing
    ]
    known = demanded(given.session.verdicts) if given.session is not None else 0
    if new and known + len(new) > MAX_VERDICTS:
        raise BadRequestError(
            f"A session remembers {MAX_VERDICTS} messages in quarantine. Leave their text out of "
            "the messages instead.",
            param=f"messages[{new[0]}].leyline.verdict",
            code="quarantine_limit",
        )


def with_reach(given: PlanInput, planned: Planned) -> Planned:
    """Return the plan with its prompt's reach.

    The plan itself considers only turns that the engine in use can hold. This adds turns that are
    on another engine, were lost with a run of this one, or have unknown tokens.
    """
    names, status = planned.names, given.status
    blind = planned.rendered is None and status.capability is None
    context = steering_digest(given.request.body) if blind else ""
    last, moved = _nearest(given)
    if names is None or last is None:
        return _with(planned, Reach(context=context)) if blind else planned
    here = last.replica == given.replica and last.model_fingerprint == status.retains_as
    if not moved and here and not blind:
        return planned
    if not moved and not here:
        moved = "engine" if last.replica == given.replica else "failover"
    # Another model may have another tokenizer.
    if last.rendered.tokens and (moved != "model" or here):
        return planned if blind else _with(planned, _compared(given, planned, names, last, moved))
    context = context or steering_digest(given.request.body)
    told = blind and last is given.last  # from the plan, which also has only messages
    edits = planned.plan.edits if told else edited_by_messages(last, planned.prepared)
    first = edits[0].cause if edits else ""
    return _with(planned, reach_by_messages(last, planned.prepared, first, context, moved))


def _nearest(given: PlanInput) -> tuple[RetainedTurn | None, Moved]:
    """Return the retained turn to compare with: of this model, of the session, or of the one that
    it continues under another id."""
    model = given.request.computed_by
    own = next((turn for turn in reversed(given.comparable) if turn.model == model), None)
    if own is not None:
        return own, ""
    if given.last is not None:
        return given.last, "model"
    before = given.before.turns if given.before is not None else ()
    return next((turn for turn in reversed(before) if turn.model == model), None), "session"


def _compared(
    given: PlanInput, planned: Planned, names: SpanNames, last: RetainedTurn, moved: Moved
) -> Reach:
    if planned.rendered is None:
        return Reach()
    turns = [turn for turn in given.retained if turn.model == last.model]
    quotes = find_quotes(turns, planned.rendered, planned.prepared.sent_fingerprints)
    found = consider(
        last,
        planned.prepared,
        planned.rendered,
        given.rules,
        names,
        recompute=Recompute(),
        decode=decode_of(given.status),
        quotes=quotes,
    )
    return reach_of(found, moved, quoting(turns, quotes))


def _with(planned: Planned, reach: Reach) -> Planned:
    return replace(planned, plan=replace(planned.plan, reach=reach))


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
