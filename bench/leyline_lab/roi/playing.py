"""Plays sessions as proxy and engine would: policies, rendering, plan, admission. No model runs."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from leyline_engine.contract import (
    ATTENTION_SINK,
    EditPayload,
    LiteralSegment,
    ReuseMode,
    ReusePayload,
    token_digest,
)
from leyline_policies import Memo, Policy
from leyline_proxy.edits.prepare import Limit, PolicySession, prepare
from leyline_proxy.model.messages import Message
from leyline_proxy.model.prepared import Prepared
from leyline_proxy.model.rendered import Rendered
from leyline_proxy.model.session import (
    RetainedTurn,
    Session,
    TurnSummary,
    turn_name,
)
from leyline_proxy.model.undeclared import UndeclaredRules
from leyline_proxy.plan.forgetting import spans_to_forget
from leyline_proxy.plan.naming import name_spans
from leyline_proxy.plan.synthesis import TurnPlan, synthesize
from leyline_proxy.render.dialects import RenderError
from leyline_proxy.render.renderer import ChatRenderer

from ..packages import replay_engine
from ..traces.recordings import RecordedSession, Trace, TraceRequest
from .results import FileRoi, Served, SessionRoi

if TYPE_CHECKING:
    from leyline_replay.dry_run import DryCache, Found

_TENANT = "roi"
_MODEL = "roi"


def _new_cache(tokens: int | None, page_tokens: int) -> DryCache:
    with replay_engine():
        from leyline_replay.dry_run import DryCache
    return DryCache(tokens=tokens, page_tokens=page_tokens)


@dataclass(frozen=True, slots=True)
class Player:
    """Everything that all files share."""

    renderer: ChatRenderer
    policies: Sequence[Policy] = ()
    rules: UndeclaredRules = UndeclaredRules()  # noqa: RUF009 - frozen
    retained_turns: int = 4
    cache_tokens: int | None = None
    mode: ReuseMode = ReuseMode.OBSERVE
    limit: Limit | None = None
    """Calls policies that aren't trusted; see `PolicySession.limit`."""
    page_tokens: int = 1
    anchor_tokens: int = 1
    open_cache: Callable[[int | None, int], DryCache] = _new_cache

    def play(self, trace: Trace, name: str, done: Callable[[], None] = lambda: None) -> FileRoi:
        """Play a file's sessions, one after the other, to a cache of their own.

        Args:
            done: called after each request.

        Raises:
            EngineUnavailable: a library of the replay engine is not installed.
        """
        cache = self.open_cache(self.cache_tokens, self.page_tokens)
        sessions: list[SessionRoi] = []
        notes = list(trace.skipped)
        for number, recorded in enumerate(trace.sessions):
            one = _Playing(self, cache, f"s{number}")
            served: list[Served] = []
            for place, request in enumerate(recorded.requests):
                try:
                    served.append(one.serve(request, _answer(recorded, place)))
                except (RenderError, _RefusedError) as error:
                    notes.append(f"{recorded.id}, request {place + 1} is left out: {error}")
                done()
            sessions.append(SessionRoi(recorded.id, tuple(served)))
        return FileRoi(name, tuple(sessions), tuple(notes))


class _RefusedError(Exception):
    """A request that the proxy would not send."""


class _Playing:
    """One session under way."""

    def __init__(self, player: Player, cache: DryCache, name: str) -> None:
        self._player = player
        self._cache = cache
        self._memo = Memo()
        self._facts = PolicySession(memo=self._memo)
        if player.limit is not None:
            self._facts = replace(self._facts, limit=player.limit)
        self._session = Session(name, _TENANT, name, (), (), 0, 0.0)
        self._turn = 0

    def serve(self, request: TraceRequest, answer: Message | None) -> Served:
        """Serve one request.

        Raises:
            RenderError: the template refuses it.
            _RefusedError: a policy that forgets failed.
        """
        self._memo.next_turn()
        turn, self._turn = self._turn, self._turn + 1
        prepared = prepare(request.messages, self._player.policies, (), turn, session=self._facts)
        self._facts = replace(self._facts, states=prepared.states, last=prepared)
        if prepared.refused is not None:
            raise _RefusedError("a policy that forgets failed")
        body = {"tools": list(request.tools)} if request.tools else {}
        rendered = self._player.renderer.render_request(prepared.messages, body, lasting=True)
        output = self._output(prepared, rendered, body, answer)
        return self._placed(turn_name(turn, self._session.id), prepared, rendered, output)

    def _output(
        self,
        prepared: Prepared,
        rendered: Rendered,
        body: Mapping[str, object],
        answer: Message | None,
    ) -> array[int]:
        """Return the tokens that a model wrote for the answer, the one that ends it included."""
        renderer, length = self._player.renderer, len(rendered.tokens)
        if answer is None:
            return array("q")
        try:
            whole = renderer.render_request(
                [*prepared.messages, answer], body, add_generation_prompt=False
            ).tokens
        except RenderError:
            return array("q")
        if whole[:length] != rendered.tokens:
            return array("q")  # the template shows an answer in another way than it asks for one
        line_end = renderer.encode("\n")
        ends = line_end and whole[-len(line_end) :] == line_end  # of the template, not the model
        return whole[length : len(whole) - len(line_end)] if ends else whole[length:]

    def _placed(
        self, name: str, prepared: Prepared, rendered: Rendered, output: array[int]
    ) -> Served:
        session = self._session
        names = name_spans(name, prepared, session.turns, session.departed, rendered)
        forget = spans_to_forget(name, prepared, names, session, named=True)
        plan = synthesize(
            session.turns,
            prepared,
            rendered,
            self._player.rules,
            names=names,
            forget=forget,
            model_fingerprint=_MODEL,
        )
        payload = _payload(session.id, name, plan, prepared)
        anchors = self._player.anchor_tokens
        asked = ReusePayload(mode=self._player.mode) if anchors == 1 else None
        found = self._cache.serve(rendered.tokens, output, payload, asked)
        source = RetainedTurn(
            turn=name,
            index=session.next_index,
            prepared=prepared,
            rendered=rendered,
            output_ids=tuple(output),
            lineage=found.lineage,
            receipt=None,
            digest=token_digest(rendered.tokens + output),
            model_fingerprint=_MODEL,
            names=names,
        )
        self._retain(source if found.retained else None, name, plan)
        return _served(found, len(rendered.tokens), _gaps(plan) * (anchors - 1))

    def _retain(self, source: RetainedTurn | None, name: str, plan: TurnPlan) -> None:
        session = self._session.forget_sources() if plan.forgets else self._session
        summary = TurnSummary(
            session.next_index, name, 0.0, plan.planned, plan.reason, plan.edits, None
        )
        keep = self._player.retained_turns
        self._session = session.retain(source, summary, keep=keep, now=0.0)


def _payload(session: str, name: str, plan: TurnPlan, prepared: Prepared) -> EditPayload:
    return EditPayload(
        session=session,
        scope=_TENANT,
        turn=name,
        sources=plan.sources,
        directives=plan.directives,
        segments=plan.segments,
        lineage=plan.lineage,
        spans=plan.spans,
        forget=plan.forget,
        share=prepared.scope or "",
        sink=ATTENTION_SINK,
    )


def _gaps(plan: TurnPlan) -> int:
    """Return the number of places with new text in front of copies."""
    kinds = [isinstance(segment, LiteralSegment) for segment in plan.segments]
    return sum(new and not after for new, after in pairwise(kinds))


def _served(found: Found, prompt: int, again: int) -> Served:
    """Return the tokens by origin.

    Args:
        again: tokens of copies that lie between anchors and new text: an estimate.
    """
    edits = max(0, found.edits - again)
    counts = found.reuse
    by_kind = (counts.clean, counts.session, counts.tenant) if counts is not None else (0, 0, 0)
    left = prompt - found.prefix - edits - sum(by_kind)
    return Served(found.prefix, edits, *by_kind, left)


def _answer(session: RecordedSession, place: int) -> Message | None:
    """Return the recorded answer to a request: what follows its last message in the next one."""
    if place + 1 >= len(session.requests):
        return None
    asked, after = session.requests[place].messages, session.requests[place + 1].messages
    if not asked:
        return None
    at = len(asked) - 1
    if after[: len(asked)] != asked:
        at = max((index for index, one in enumerate(after) if one == asked[-1]), default=-1)
    following = after[at + 1 : at + 2] if at >= 0 else ()
    return next((one for one in following if one.get("role") == "assistant"), None)
