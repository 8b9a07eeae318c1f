"""The prompts of ``leyline bench reuse``: six patterns of how agents compose prompts. Pure.

A prompt is a sequence of parts, each tokenised by itself, so that equal parts have equal tokens::

    agent_meta     HEADER │ shared ─────────────────────────────────────── │ task
    sysvar         shared ─────────────── │ VARIABLE │ shared ──────────── │ question
    compact        shared ─── │ SUMMARY of the first messages │ later messages │ new message
    rerank         shared ─── │ documents IN ANOTHER ORDER ─────────────── │ question
    tool_variants  schemas IN ANOTHER ORDER, or one CHANGED │ shared ───── │ question
    clock          CLOCK │ shared ─── │ messages ───────────────────────── │ new message

No part is a marker: nothing in a prompt says where shared content begins.
"""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import ceil
from typing import Any

from leyline_lab.reuse.figures import BenchRequest
from leyline_lab.traces.texts import Material

REQUESTS_PER_SESSION = 6
FEW_SESSIONS = 4
_SHORTEST_TEXT = 2_000
_ROLES = (
    "planner",
    "reviewer of changes to the code",
    "tester",
    "writer of release notes and of the manual",
    "reader of logs",
)
_PLANS = ("free", "team", "enterprise, billed by the year", "trial until the end of the month")


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A prompt as its parts, and the session that sends it."""

    session: str
    parts: tuple[str, ...]


class Workload:
    """Writes the requests of patterns; equal arguments give equal requests.

    Args:
        material: the text; it is read again from its beginning if it is too short.
        requests: number of requests per pattern.
        scale: 1 is a prompt of about 2,000 characters.

    Raises:
        ValueError: there is too little text.
    """

    def __init__(self, material: Material, requests: int, scale: float = 1.0) -> None:
        if len(material.text) < _SHORTEST_TEXT:
            raise ValueError(f"{len(material.text)} characters of text are too few for a workload")
        if len(material.tools) < 2:
            raise ValueError("a workload needs the schemas of two tools or more")
        self._material = material
        self._requests = requests
        self._scale = scale
        self._at = 0

    def write(self, pattern: str) -> list[TextRequest]:
        """Return the requests of one of :data:`PATTERNS`."""
        self._at = 0
        return list(PATTERNS[pattern](self, random.Random(pattern)))

    def _turns(self) -> Iterator[tuple[str, int]]:
        """Yield the session of each request, and its earlier requests; each has two or more."""
        sessions = max(
            min(FEW_SESSIONS, self._requests // 2), ceil(self._requests / REQUESTS_PER_SESSION)
        )
        for number in range(self._requests):
            yield f"session{number % sessions}", number // sessions

    def _take(self, characters: int) -> str:
        """Return the next characters of the text, up to the end of a word."""
        text = self._material.text
        start, wanted = self._at, max(1, round(characters * self._scale))
        if start + wanted >= len(text):
            start = 0
        end = text.find(" ", start + wanted)
        self._at = end if end >= 0 else len(text)
        return text[start : self._at]

    def agent_meta(self, chance: random.Random) -> Iterator[TextRequest]:
        """A header of each agent's own in front of a large shared region."""
        shared = self._take(1600)
        for number, (session, _turn) in enumerate(self._turns()):
            header = (
                f"Run {chance.randrange(16**6):06x}, step {number + 1}. "
                f"Agent {chance.randrange(10**4)}: {chance.choice(_ROLES)}.\n"
            )
            yield TextRequest(session, (header, shared, self._asked(150)))

    def sysvar(self, chance: random.Random) -> Iterator[TextRequest]:
        """A variable in the middle of a shared system prompt."""
        before, after = self._take(900), self._take(800)
        for session, _turn in self._turns():
            number, plan = chance.randrange(10**7), chance.choice(_PLANS)
            variable = f"\nThe user's number is {number}; plan: {plan}.\n"
            yield TextRequest(session, (before, variable, after, self._asked(150)))

    def compact(self, _: random.Random) -> Iterator[TextRequest]:
        """A conversation whose beginning gives way to a summary at every second request."""
        shared = self._take(500)
        messages: dict[str, list[str]] = {}
        for session, turn in self._turns():
            kept = messages.setdefault(session, [])
            if turn == 0:
                kept += [self._message(250) for _ in range(5)]
            if turn % 2:
                summary = "\nSummary of the conversation so far: " + self._take(120)
                kept[: len(kept) // 2] = [summary]
            kept.append(self._message(250))
            yield TextRequest(session, (shared, *kept))

    def rerank(self, chance: random.Random) -> Iterator[TextRequest]:
        """Four of seven retrieved documents, ranked by the question."""
        shared = self._take(300)
        documents = ["\nDocument: " + self._take(420) for _ in range(7)]
        for session, _turn in self._turns():
            yield TextRequest(session, (shared, *chance.sample(documents, 4), self._asked(150)))

    def tool_variants(self, chance: random.Random) -> Iterator[TextRequest]:
        """Schemas of tools before all else: in turn in another order, and with one changed."""
        order = [dict(tool) for tool in self._material.tools]
        shared = self._take(700)
        for number, (session, _turn) in enumerate(self._turns()):
            if number % 2:
                at = chance.randrange(len(order))
                order[at] = _changed(order[at], number)
            else:
                chance.shuffle(order)
            schemas = (json.dumps(tool) + "\n" for tool in order)
            yield TextRequest(session, (*schemas, shared, self._asked(150)))

    def clock(self, chance: random.Random) -> Iterator[TextRequest]:
        """The time at the beginning of the system prompt of conversations that grow."""
        shared = self._take(700)
        now = datetime(2026, 11, 3, 9, 5, 7, tzinfo=UTC)
        messages: dict[str, list[str]] = {}
        for session, turn in self._turns():
            now += timedelta(seconds=chance.randrange(1, 300_000))
            kept = messages.setdefault(session, [])
            if turn == 0:
                kept += [self._message(250) for _ in range(3)]
            kept.append(self._message(250))
            clock = f"It is {now:%A}, {now.day} {now:%B}, {now.hour}:{now:%M:%S}.\n"
            yield TextRequest(session, (clock, shared, *kept))

    def _asked(self, characters: int) -> str:
        return "\nUser: " + self._take(characters) + "\nAssistant:"

    def _message(self, characters: int) -> str:
        return "\nMessage: " + self._take(characters)


PATTERNS: Mapping[str, Callable[[Workload, random.Random], Iterator[TextRequest]]] = {
    "agent_meta": Workload.agent_meta,
    "sysvar": Workload.sysvar,
    "compact": Workload.compact,
    "rerank": Workload.rerank,
    "tool_variants": Workload.tool_variants,
    "clock": Workload.clock,
}
"""Writers of requests by pattern, in the order in which they are measured."""


def texts_of(requests: Sequence[TextRequest]) -> list[str]:
    """Return each part once, to be tokenised by itself."""
    return list(dict.fromkeys(part for request in requests for part in request.parts))


def assembled(
    requests: Sequence[TextRequest], tokens: Mapping[str, Sequence[int]]
) -> list[BenchRequest]:
    """Return requests in tokens, given those of each part."""
    return [
        BenchRequest(
            request.session,
            array("q", (token for part in request.parts for token in tokens[part])),
        )
        for request in requests
    ]


def _changed(tool: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a schema with another description."""
    body = dict(tool.get("function", tool))
    first = str(body.get("description", "")).split(" (revision ")[0]
    body["description"] = f"{first} (revision {number})"
    return {**tool, "function": body} if "function" in tool else body
