"""``leyline bench reuse`` on a live SGLang: each arm has a namespace and a tenant of its own.

::

    cold    a namespace per request     its greedy tokens are the answer that all are compared on
    live    reuse                  ┐
    radix   exact prefixes only    ├    the same requests in the same order
    naive   reuse, not rotated     ┘

After its timed request, an arm is asked for its distributions along the answer: in the timed
request's own KV, by a session that continues its lineage.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from leyline_engine.contract import (
    Capability,
    EditPayload,
    LineageRun,
    ReuseMode,
    ReusePayload,
    TokenCounts,
)
from leyline_lab.reuse.figures import BenchRequest, Closeness, Sample

from ..errors import ServerAnswerError
from ..three_arm.clients import GenerateClient, ServerAnswer, TokenLogprobs

UNROTATED = "unrotated"
"""Prefix of the names of the control's sessions; its plugin recognises them."""
_ARMS = 4
"""Namespaces that keep a prompt each."""
_LIKELIEST = 8192
"""Maximum number of tokens per distribution; the shipped model has fewer in all."""
_LIVE = ReusePayload(mode=ReuseMode.LIVE)


@dataclass(slots=True)
class _Arm:
    """A tenant with its sessions, as a proxy would keep them."""

    name: str
    prefix: str = ""
    """Prefix of the names of its sessions."""
    lineages: dict[str, tuple[LineageRun, ...]] = field(default_factory=dict)

    def payload(self, session: str, turn: str) -> EditPayload:
        """Return the payload of a session's next request."""
        return EditPayload(
            session=self.prefix + session,
            scope=self.name,
            turn=turn,
            lineage=self.lineages.get(session, ()),
        )


@dataclass(frozen=True, slots=True)
class _Served:
    """One request as an arm with reuse served it."""

    ttft_ms: float
    tokens: TokenCounts
    output: tuple[int, ...]


class SglangReuseBench:
    """Measures requests on one server.

    Args:
        length: number of tokens that are generated for each request.
        control: True if the server has the control, which leaves keys unrotated.
    """

    def __init__(
        self, client: GenerateClient, capability: Capability, length: int, *, control: bool
    ) -> None:
        self._client = client
        self._capability = capability
        self._length = length
        self._control = control
        self._likeliest = min(capability.vocab_size, _LIKELIEST)
        self._round = 0
        self._stored = 0
        """Tokens that all arms may have cached since the last flush."""

    async def measure(
        self, requests: Sequence[BenchRequest], advance: Callable[[], None]
    ) -> list[Sample]:
        """Serve requests one after the other, by every arm, from empty caches."""
        await self._client.flush()
        self._round += 1
        self._stored = 0
        live = _Arm(f"live{self._round}")
        naive = _Arm(f"naive{self._round}", f"{UNROTATED}.")
        cached: list[array[int]] = []
        samples = []
        for number, request in enumerate(requests):
            sample = await self._sample(number, request, live, naive, cached)
            samples.append(sample)
            advance()
        return samples

    async def _sample(
        self,
        number: int,
        request: BenchRequest,
        live: _Arm,
        naive: _Arm,
        cached: list[array[int]],
    ) -> Sample:
        from leyline_lab.reuse.recovery import recoverable_tokens, tokens_by_arm

        cold = f"cold{self._round}.{number}"
        truth = await self._client.generate(request.tokens, self._length, salt=cold, logprobs=False)
        full = await self._client.score(request.tokens, truth.output, self._likeliest, salt=cold)
        if number % 2:
            served, radix = await self._live(live, number, request), await self._radix(request)
        else:
            radix, served = await self._radix(request), await self._live(live, number, request)
        scores = await self._scored(live, number, request, truth.output)
        control, copied = await self._naive(naive, number, request, truth.output, full)
        prefix = served.tokens.prefix
        known = cached if self._holds_all(request) else None
        sample = Sample(
            prompt=served.tokens.prompt,
            prefix=prefix,
            reused=served.tokens.reused,
            recoverable=None
            if known is None
            else recoverable_tokens(known, request.tokens, prefix),
            arms={} if known is None else tokens_by_arm(known, request.tokens, prefix),
            radix_prefix=radix.cached_tokens,
            live_ms=served.ttft_ms,
            radix_ms=radix.ttft_ms,
            live=compare(full, scores),
            naive=control,
            naive_reused=copied,
        )
        cached.append(request.tokens + array("q", served.output[:-1]))
        cached.append(request.tokens + array("q", truth.output))
        return sample

    async def _live(self, arm: _Arm, number: int, request: BenchRequest) -> _Served:
        turn = f"r{number}"
        message_id = f"{arm.name}.{turn}"
        answer = await self._client.generate(
            request.tokens,
            self._length,
            salt=arm.name,
            message_id=message_id,
            payload=arm.payload(request.session, turn),
            reuse=_LIVE,
            logprobs=False,
        )
        receipt = (await self._client.record(message_id)).receipt
        arm.lineages[request.session] = receipt.lineage
        return _Served(answer.ttft_ms, receipt.tokens, answer.output)

    async def _radix(self, request: BenchRequest) -> ServerAnswer:
        salt = f"radix{self._round}"
        return await self._client.generate(request.tokens, self._length, salt=salt, logprobs=False)

    async def _scored(
        self, arm: _Arm, number: int, request: BenchRequest, answer: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Return distributions in the KV of the request that the arm has just served."""
        message_id = f"{arm.name}.s{number}"
        lineage = arm.lineages[request.session]
        payload = EditPayload(session="scores", scope=arm.name, turn=f"s{number}", lineage=lineage)
        found = await self._client.score(
            request.tokens,
            answer,
            self._likeliest,
            salt=arm.name,
            message_id=message_id,
            payload=payload,
        )
        counts = (await self._client.record(message_id)).receipt.tokens
        if counts.prefix < len(request.tokens) - 1:
            raise ServerAnswerError(
                f"only {counts.prefix} of {len(request.tokens)} tokens that were just served "
                "are cached: the pool is too small, give fewer or shorter requests"
            )
        return found

    async def _naive(
        self,
        arm: _Arm,
        number: int,
        request: BenchRequest,
        answer: Sequence[int],
        full: Sequence[TokenLogprobs],
    ) -> tuple[Closeness | None, int | None]:
        """Return how close the control is, and how many tokens it copied."""
        if not self._control:
            return None, None
        served = await self._live(arm, number, request)
        scores = await self._scored(arm, number, request, answer)
        return compare(full, scores), served.tokens.reused

    def _holds_all(self, request: BenchRequest) -> bool:
        """Return True if the pool has room for all requests so far, so that none was evicted."""
        kv = self._capability.kv
        self._stored += stored_tokens(len(request.tokens), self._length)
        return kv is not None and self._stored <= kv.capacity_tokens


def compare(full: Sequence[TokenLogprobs], other: Sequence[TokenLogprobs]) -> Closeness:
    """Compare distributions with those of the full prefill, over the tokens that both list."""
    kl = tuple(_divergence(expected, found) for expected, found in zip(full, other, strict=True))
    equal = (_likeliest(one) == _likeliest(two) for one, two in zip(full, other, strict=True))
    return Closeness(kl, tuple(equal))


def _divergence(expected: TokenLogprobs, found: TokenLogprobs) -> float:
    terms = (
        math.exp(logprob) * (logprob - found[token])
        for token, logprob in expected.items()
        if token in found
    )
    return max(0.0, math.fsum(terms))


def _likeliest(step: TokenLogprobs) -> int:
    return max(step, key=lambda token: step[token])


def stored_tokens(prompt: int, length: int) -> int:
    """Return how many KV slots a prompt takes at most, in all arms, with its answers."""
    return _ARMS * (prompt + 2 * length)
