"""The compaction of one request: a turn of its session writes the summary, and another one answers.

::

    client   request ───────────────────────────────────────────────▶ summary, answer
    turns    prompt, question ─▶ summary │ instructions, summary ─▶ answer

Both are turns like any other: policies edit them, the session retains them, and the engine has
their KV under its name. So what is forgotten isn't in a summary, and a summary's own KV is there
when the next turn quotes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import httpx
import msgspec
import structlog
from starlette.types import Receive

from leyline_engine.contract import RECORD_MEMBER
from leyline_policies.verbs import Verbs, evict

from ..apis.chat_answers import content_of, count, first_choice, prompt_tokens
from ..errors import ClientDisconnected, ProxyError, UpstreamRefusalError
from ..model.clock import TurnClock
from ..model.compaction import (
    MAX_SUMMARY,
    Compacted,
    CompactionReport,
    CompactionWish,
    instructions_in,
    is_worth_it,
    kept_of,
)
from ..model.fields import OPTIONS_FIELD
from ..model.prepared import POLICY, Prepared
from ..request.compaction import compacted_body, question_body
from ..request.parse import ChatRequest, parse_chat
from ..request.wire import take_member
from ..turns import Account
from ..turns.charging import prompt_size
from ..turns.records import record_in
from ..turns.turn import Turn
from ..upstream.client import read
from ..wiring.services import Services
from .api import ApiCall
from .chat import open_chat
from .limits import until_disconnect, within
from .refusal import answer_of, refusal_of_answer
from .signs import Signs
from .sse import is_text

log = structlog.get_logger("leyline.http")

BELOW, NOTHING = "below_threshold", "nothing_to_compact"


@dataclass(frozen=True, slots=True)
class Written:
    """A summary, and the turn that wrote it."""

    report: CompactionReport
    turn: Turn
    account: Account
    stream: bool = False
    """True if the client wants a stream."""


@dataclass(frozen=True, slots=True)
class Step:
    """The next step of a request."""

    chat: ChatRequest
    """The request from here on."""
    withdrawn: bool = False
    """True if its turn was withdrawn, and another one must begin."""
    spent_s: float = 0.0
    """Time for the summary."""
    paused: Written | None = None
    """The summary, if the answer ends with it."""


class Compacting:
    """Compacts a request, if it asks for that.

    Args:
        call: the client's request.
    """

    def __init__(self, services: Services, call: ApiCall) -> None:
        self._services = services
        self._call = call

    async def step(self, turn: Turn, receive: Receive, signs: Signs | None = None) -> Step:
        """Return how a request goes on whose turn has been planned, but not sent.

        A compaction that fails leaves the request as it is, unless that asks for nothing else.

        Args:
            signs: given to the client meanwhile.

        Raises:
            ClientDisconnected: the client left meanwhile.
            ProxyError: the request asks for a compaction alone, and there is none.
        """
        chat, wish = turn.request, turn.request.compaction
        if wish is None or chat.compacted is not None:
            return Step(chat)
        tokens = prompt_size(turn)
        if wish.threshold is not None and tokens <= wish.threshold:
            return self._unchanged(chat, CompactionReport(BELOW, tokens))
        if wish.threshold is not None and not is_worth_it(turn.planned.prepared.messages):
            return self._unchanged(chat, CompactionReport(NOTHING, tokens))
        begun = perf_counter()
        await self._services.ends.release(turn)
        try:
            await self._services.gate.check_rate(chat.tenant)
            written = await self.write(chat, wish, receive, again=turn, signs=signs)
        except ClientDisconnected:
            raise
        except ProxyError as error:
            if wish.threshold is None:
                raise
            log.warning("compaction_failed", tenant=chat.tenant.name, why=error.code)
            failed = self._unchanged(chat, CompactionReport(error.code, tokens))
            return replace(failed, withdrawn=True, spent_s=perf_counter() - begun)
        spent_s = perf_counter() - begun
        report = replace(written.report, prompt_tokens=tokens)
        self._call.compacts(chat, report)
        if wish.pause:
            paused = replace(written, report=report, stream=chat.stream)
            return Step(chat, withdrawn=True, spent_s=spent_s, paused=paused)
        return Step(_shorter(chat, report, written.turn), withdrawn=True, spent_s=spent_s)

    async def write(
        self,
        chat: ChatRequest,
        wish: CompactionWish,
        receive: Receive,
        *,
        again: Turn | None = None,
        signs: Signs | None = None,
    ) -> Written:
        """Return the summary of a request's conversation.

        Args:
            again: a turn of the same request, in whose session this one is.
            signs: given to the client meanwhile.

        Raises:
            ProxyError: the engine gave none.
            ClientDisconnected: the client left meanwhile.
        """
        settings, metrics = self._services.settings, self._services.metrics
        result = "failed"
        try:
            work = until_disconnect(receive, self._write(chat, wish, again), signs)
            written = await within(settings.total_timeout_s, work)
            result = "written"
        finally:
            metrics.compactions.labels(result).inc()
        return written

    async def _write(self, chat: ChatRequest, wish: CompactionWish, again: Turn | None) -> Written:
        most = self._services.settings.compaction_tokens
        messages = [*chat.body["messages"], wish.question()]
        raw = msgspec.json.encode(question_body(chat.body, messages, max_tokens=most))
        asked = replace(
            parse_chat(raw, chat.headers, chat.tenant), compaction=None, continues=chat.continues
        )
        turn, ends = await self._services.turns.begin(asked, again=again), self._services.ends
        pending = left = False
        try:
            await self._services.charges.reserve(turn)
            pending = True
            upstream, body = await self._answered(turn)
            if upstream.status_code != httpx.codes.OK:
                pending = upstream.is_server_error
                raise await ends.refusal(turn) or refusal_of_answer(upstream.status_code, body)
            body, member = take_member(body, RECORD_MEMBER) if turn.enveloped else (body, None)
            answer = answer_of(body)
            turn.request.clock.token()
            came = record_in(turn, member) if member is not None else None
            account = await ends.settle(turn, _usage(answer), came=came, quotable=is_text(answer))
            pending = False
        except asyncio.CancelledError:
            left = True
            raise
        finally:
            try:
                if pending:
                    await ends.abandon(turn, client_left=left)
            finally:
                await ends.release(turn)
        return Written(self._report(turn, answer, account, pause=wish.pause), turn, account)

    async def _answered(self, turn: Turn) -> tuple[httpx.Response, bytes]:
        async with open_chat(self._services, turn, self._call.headers_upstream()) as upstream:
            return upstream, await read(upstream)

    def _report(
        self, turn: Turn, answer: Mapping[str, Any], account: Account, *, pause: bool
    ) -> CompactionReport:
        choice = first_choice(answer) or {}
        said = choice.get("message")
        text = content_of(said) if isinstance(said, Mapping) else ""
        if not text.strip():
            raise UpstreamRefusalError(
                502, "The model wrote no summary.", kind="upstream_error", code="no_summary"
            )
        usage = _usage(answer) or {}
        prompt, cached = prompt_tokens(usage, account.members[OPTIONS_FIELD])
        prepared, asked = turn.planned.prepared, len(turn.request.messages) - 1
        covered = (
            entry.message for entry in prepared.sent if entry.client_index not in (None, asked)
        )
        return CompactionReport(
            reason=None,
            prompt_tokens=prompt,
            compacted=Compacted(
                text[:MAX_SUMMARY],
                kept_of(covered, prompt_tokens=prompt_size(turn)),
                turn.identity.session_id,
            ),
            turn=turn.name,
            usage={
                "prompt_tokens": prompt,
                "cached_tokens": cached,
                "completion_tokens": count(usage.get("completion_tokens")),
            },
            applied=turn.applied,
            truncated=choice.get("finish_reason") == "length" or len(text) > MAX_SUMMARY,
            paused=pause,
            text=self._call.shows_compaction,
        )

    def _unchanged(self, chat: ChatRequest, report: CompactionReport) -> Step:
        return Step(replace(chat, compacted=report))


def _shorter(chat: ChatRequest, report: CompactionReport, asked: Turn) -> ChatRequest:
    """Return the request with the summary in place of its conversation.

    Args:
        asked: the turn that wrote the summary.
    """
    assert report.compacted is not None  # noqa: S101 - it was just written
    kept = instructions_in(chat.messages)
    gone = set(_evicted(asked.planned.prepared))
    # Without the answers after it, a message would be younger than it is, and come back.
    instructions = [evict(chat.messages[at]) if at in gone else chat.messages[at] for at in kept]
    messages = [*instructions, *report.compacted.messages()]
    body = compacted_body(chat.body, chat.options.edits, kept, messages)
    raw = msgspec.json.encode(body)
    shorter = parse_chat(raw, chat.headers, chat.tenant, clock=TurnClock())
    return replace(
        shorter,
        offers_recall=chat.offers_recall,
        compaction=chat.compaction,
        compacted=report,
        continues=chat.continues,
    )


def _evicted(prepared: Prepared) -> Iterator[int]:
    """Yield the messages that went by their own annotations, by index in the client's list."""
    for each in prepared.dropped:
        if each.change.cause.startswith(f"{POLICY}:{Verbs.name}:"):
            yield each.client_index


def _usage(answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    usage = answer.get("usage")
    return usage if isinstance(usage, Mapping) else None
