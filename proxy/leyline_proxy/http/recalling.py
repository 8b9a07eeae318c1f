"""The recalls of one request: the turns that answer a model's calls out of the client's sight.

::

    client   request ────────────────────────────────────────────▶ answer
    turns    prompt ─▶ calls │ prompt, calls, results ─▶ calls │ … ─▶ answer
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import orjson

from ..apis.chat_answers import count, first_choice
from ..apis.recall_calls import RecallAsked, RecallScreen, with_start, without_calls
from ..edits.asides import CHANGE
from ..model.asides import Aside
from ..model.clock import TurnClock
from ..model.fields import OPTIONS_FIELD
from ..model.working_set import PieceReport
from ..request.parse import ChatRequest
from ..request.recall_tool import recalls, why_not_offered
from ..turns import Account
from ..turns.recalling import Recalls
from ..turns.turn import Turn
from .sse import DONE, ChunkFacts, event_data

_HEAD = ("id", "created")
"""Members that all chunks of an answer share."""


class RecallLoop:
    """The turns of one request, and what its client gets of them.

    Args:
        service: finds the texts.
    """

    def __init__(self, service: Recalls) -> None:
        self._service = service
        self._budget = service.budget()
        self._asides: list[Aside] = []
        self._calls: list[PieceReport] = []
        self._references: list[PieceReport] = []
        self._turns: list[dict[str, Any]] = []
        self._written = 0
        """Completion tokens of the turns before this one."""
        self._stopped = False
        self.head: dict[str, Any] = {}
        """What the first turn's chunks share."""
        self.begun = False
        """True once the client was sent a delta."""
        self.goes_on = False
        """True if another turn follows, because this one only asked for texts."""

    @property
    def text(self) -> str:
        """Text that earlier turns wrote in front of their calls."""
        return "".join(aside.text for aside in self._asides if not aside.joined)

    def next_request(self, request: ChatRequest) -> ChatRequest:
        """Return the request of the next turn: the same, with times of its own."""
        self.goes_on = False
        return replace(request, clock=TurnClock())

    async def answer(self, turn: Turn, asked: RecallAsked | None) -> Aside | None:
        """Return the answer to a turn's calls; None if it has none, or none that is answered.

        A model that still asks after it was told that nothing more is recalled isn't answered.
        """
        if asked is None:
            return None
        if any(call.cause == "limit" for aside in self._asides for call in aside.calls):
            self._stopped = True
            return None
        aside = await self._service.answered(turn, asked, self._budget)
        self._asides.append(aside)
        self.goes_on = not aside.joined
        return aside

    def take_back(self) -> None:
        """Forget the last answer: its engine failed before the turn was settled."""
        if self.goes_on:
            self._asides.pop()
        self.goes_on = False

    def shown(self, answer: Mapping[str, Any]) -> bytes:
        """Return a turn's whole answer as the client gets it, the last aside's calls left out."""
        shown = without_calls(answer) if not self.goes_on else {**answer}
        shown = with_start(shown, self.text)
        if isinstance(shown.get("usage"), dict):
            shown["usage"] = self.usage(shown["usage"])
        return orjson.dumps(shown)

    def usage(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return a turn's usage with the completion tokens of the turns before it.

        The prompt is this turn's: agents read the size of their context from it.
        """
        added = {
            name: count(usage[name]) + self._written
            for name in ("completion_tokens", "total_tokens")
            if name in usage
        }
        return {**usage, **added}

    def spent(self, usage: Mapping[str, Any] | None) -> None:
        """Add the usage of a turn that only asked for texts."""
        self._written += count((usage or {}).get("completion_tokens"))

    def account(self, turn: Turn, account: Account) -> None:
        """Add the recalls to a turn's account, if the client gets it."""
        if not recalls(turn.request):
            return
        for each in account.recalled:
            if each.way == "tool":
                selector = f"calls[{len(self._calls)}]"
                self._calls.append(msgspec.structs.replace(each.report, selector=selector))
            elif each.way == "reference":
                self._references.append(each.report)
        member = account.members[OPTIONS_FIELD]
        if self.goes_on:
            self._turns.append({"turn": turn.name, "tokens": member["tokens"]})
            return
        offered = turn.request.offers_recall
        member["recall"] = {
            "offered": offered,
            "why_not": None if offered else why_not_offered(turn.request.body) or "setting",
            "calls": [report.document() for report in self._calls],
            "references": [report.document() for report in self._references],
            "turns": self._turns,
            "stopped": "limit" if self._stopped else None,
        }
        if turn.request.options.recall == "shown":
            member["recall"]["messages"] = [
                entry.message
                for entry in turn.planned.prepared.sent
                if entry.client_index is None and CHANGE in entry.changes
            ]


class RecallStream:
    """The chunks of one turn of a request with recalls, as the client gets them.

    Args:
        later: True for a turn after the request's first, whose chunks become part of the first's.
    """

    def __init__(self, loop: RecallLoop, turn: Turn, *, later: bool) -> None:
        self._loop = loop
        self._turn = turn
        self._later = later
        self._screen = RecallScreen()
        self.aside: Aside | None = None
        """The answer to the turn's calls, once the turn has finished."""

    async def passed(self, event: bytes, facts: ChunkFacts) -> bytes:
        """Return the event for the client; nothing if it has nothing for it."""
        data = event_data(event)
        if not data or data == DONE:
            return event
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError:
            return event
        if not isinstance(chunk, dict):
            return event
        self._loop.head = self._loop.head or {name: chunk[name] for name in _HEAD if name in chunk}
        choice = first_choice(chunk)
        delta = choice.get("delta") if choice is not None else None
        shown = delta
        if isinstance(delta, Mapping):
            shown = self._screen.feed(delta, last=facts.finishes)
        if facts.finishes:
            self.aside = await self._loop.answer(self._turn, self._screen.asked)
        if self._later and isinstance(delta, Mapping):
            shown = self._joined(shown)
        if shown is None and delta is not None and not facts.finishes and not facts.usage:
            return b""
        self._loop.begun = self._loop.begun or shown is not None
        if shown is delta and not self._later and not self._screen.asked:
            return event
        return self._encoded(chunk, choice, shown, facts)

    def _joined(self, shown: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return a later turn's delta as a part of the first's, which alone has a role."""
        rest = {name: value for name, value in (shown or {}).items() if name != "role"}
        if not any(rest.values()):
            return None
        return rest if self._loop.begun else {"role": "assistant", **rest}

    def _encoded(
        self,
        chunk: dict[str, Any],
        choice: Mapping[str, Any] | None,
        delta: object,
        facts: ChunkFacts,
    ) -> bytes:
        if choice is not None:
            shown = {**choice, "delta": delta or {}}
            asked = self._screen.asked
            cut = choice.get("finish_reason") != "tool_calls"
            if asked is not None and not asked.own and facts.finishes and not cut:
                shown["finish_reason"] = "stop"
            chunk = {**chunk, "choices": [shown]}
        if isinstance(chunk.get("usage"), dict):
            chunk = {**chunk, "usage": self._loop.usage(chunk["usage"])}
        return b"data: %b\n\n" % orjson.dumps({**chunk, **self._loop.head})
