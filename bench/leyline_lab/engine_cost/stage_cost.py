"""The price of one more forward on a server, in tokens that it prefills in the same time.

Prompts of a cached session are sent again with one stub, and with several stubs far apart: each
further stub is one more gap, which the engine computes in a forward of its own. Then prompts are
sent with a few new tokens, and with many. The slopes of the time to the first token are the price
of a forward and of a token; their ratio is the value for LEYLINE_STAGE_COST_TOKENS. Order is
shuffled, and medians are of the pairs.

A running server must have been started with LEYLINE_STAGE_COST_TOKENS=0.
"""

from __future__ import annotations

import argparse
import asyncio
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median

from leyline_engine.contract import (
    Directive,
    EditPayload,
    SourceRef,
    apply_directives,
    token_array,
    token_digest,
)

from ..console import write_json
from ..engines.sglang import sglang_server
from ..harness.arguments import Arguments
from ..three_arm.clients import GenerateClient

_STUB, _CUT = 4, 8
"""Tokens of a stub, and of what it replaces."""
_VOCABULARY = range(10, 400)


@dataclass(frozen=True, slots=True)
class Cost:
    """The time of a server's forwards and tokens."""

    stage_ms: float
    """One more forward, of a few tokens."""
    token_us: float
    """One more prefilled token."""
    tokens: int
    """The price of a forward, in tokens."""
    pairs: int


class Meter:
    """Times requests of one server.

    Args:
        client: the server.
        length: tokens of the prompts.
        gaps: stubs of the longer turns.
        more: further new tokens of the longer appends.
    """

    def __init__(self, client: GenerateClient, length: int, gaps: int, more: int) -> None:
        self._client, self._length, self._gaps, self._more = client, length, gaps, more
        self._rng = Random(7)
        self._names = 0

    def _text(self, length: int) -> list[int]:
        return self._rng.choices(_VOCABULARY, k=length)

    async def edited(self, gaps: int) -> float:
        """Return the milliseconds to the first token of a turn with so many gaps."""
        self._names += 1
        session, prompt = f"stage{self._names}", self._text(self._length)
        opens = EditPayload(session=session, scope="bench", turn="t1")
        first = await self._client.generate(
            prompt, 1, salt=session, message_id=f"{session}.1", payload=opens, logprobs=False
        )
        source = [*prompt, *first.output]
        step = self._length // (gaps + 1)
        cuts = [
            Directive(at, at + _CUT, tuple(self._text(_STUB)))
            for at in range(step, step * (gaps + 1), step)
        ]
        edit = EditPayload(
            session=session,
            scope="bench",
            turn="t2",
            sources=(SourceRef("t1", len(source), token_digest(token_array(source))),),
            directives=tuple(cuts),
        )
        edited = [*apply_directives(source, cuts), *self._text(_STUB)]
        answer = await self._client.generate(
            edited, 1, salt=session, message_id=f"{session}.2", payload=edit, logprobs=False
        )
        missing = self._length - answer.cached_tokens
        if missing > self._length // 2:
            raise SystemExit("the server splices nothing; see `leyline doctor`")
        return answer.ttft_ms

    async def appended(self, count: int) -> float:
        """Return the milliseconds to the first token after so many new ones."""
        self._names += 1
        salt, prompt = f"append{self._names}", self._text(self._length)
        await self._client.generate(prompt, 1, salt=salt, logprobs=False)
        longer = [*prompt, *self._text(count)]
        return (await self._client.generate(longer, 1, salt=salt, logprobs=False)).ttft_ms

    async def measure(self, pairs: int) -> Cost:
        """Return the medians of ``pairs`` pairs; one before them doesn't count."""
        stages, tokens = [], []
        for _ in range(pairs + 1):
            arms = {1: 0.0, self._gaps: 0.0}
            for gaps in self._rng.sample(sorted(arms), 2):
                arms[gaps] = await self.edited(gaps)
            stages.append((arms[self._gaps] - arms[1]) / (self._gaps - 1))
            lengths = {_STUB: 0.0, _STUB + self._more: 0.0}
            for count in self._rng.sample(sorted(lengths), 2):
                lengths[count] = await self.appended(count)
            tokens.append((lengths[_STUB + self._more] - lengths[_STUB]) / self._more)
        stage, token = median(stages[1:]), median(tokens[1:])
        return Cost(round(stage, 3), round(1e3 * token, 2), max(0, round(stage / token)), pairs)


async def _run(url: str, given: argparse.Namespace) -> Cost:
    client = GenerateClient(url)
    try:
        meter = Meter(client, given.tokens, given.gaps, given.more)
        return await meter.measure(given.pairs)
    finally:
        await client.close()


def main() -> None:
    """Measure, print, write."""
    parser = Arguments(__doc__)
    parser.add_argument("--url", help="a running server; without it, one starts on the CPU")
    parser.add_argument("--tokens", type=int, default=1500, help="tokens of the prompts")
    parser.add_argument("--gaps", type=int, default=9, help="gaps of the longer turns")
    parser.add_argument("--more", type=int, default=256, help="new tokens of the longer appends")
    parser.add_argument("--pairs", type=int, default=7, help="pairs that count")
    parser.add_argument("--log", type=Path, default=Path("out/stage_cost.log"))
    given = parser.parse_args()
    with ExitStack() as stack:
        url = given.url
        if url is None:
            environment = {"LEYLINE_STAGE_COST_TOKENS": "0"}
            url = stack.enter_context(sglang_server(None, given.log, (), environment)).url
        cost = asyncio.run(_run(url, given))
    print(f"one more forward: {cost.stage_ms} ms; one more token: {cost.token_us} µs")
    print(f"LEYLINE_STAGE_COST_TOKENS={cost.tokens}")
    write_json(given.json, asdict(cost))
