"""The common part of the benchmarks' clients: answers, receipts, the capability."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import httpx
import msgspec

from leyline_engine.contract import (
    CAPABILITY_PATH,
    RECEIPT_PATH,
    Capability,
    EditPayload,
    TurnRecord,
    judge,
)

from ..errors import ServerAnswerError

TOP = 20
"""Number of likeliest tokens reported for each generated one."""
_RECEIPT_WAIT_S = 10.0
_TIMEOUT = httpx.Timeout(900.0, connect=30.0)

StepLogprobs = Mapping[str, float]
"""Log probabilities by token text, of the likeliest tokens at one generated position."""


TokenLogprobs = Mapping[int, float]
"""Log probabilities by token id, of the likeliest tokens at one position."""


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """One streamed answer; times in ms since the request was sent."""

    ttft_ms: float
    e2e_ms: float
    prompt_tokens: int
    cached_tokens: int
    output: tuple[int, ...]
    chosen: tuple[str, ...]
    """Texts of the generated tokens."""
    top: tuple[StepLogprobs, ...]

    @property
    def forward_ms(self) -> float:
        """Mean time between generated tokens: about one forward."""
        return (self.e2e_ms - self.ttft_ms) / max(1, len(self.output) - 1)


class BenchClient(ABC):
    """Sends prompts of token ids to one server; must be closed at the end."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=_TIMEOUT,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    @abstractmethod
    async def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        salt: str,
        message_id: str = "",
        payload: EditPayload | None = None,
    ) -> ServerAnswer:
        """Return greedy tokens, past any end of sequence.

        Args:
            salt: namespace of the cache that the request sees.
            payload: sent in an envelope under ``message_id``; None sends no envelope.

        Raises:
            ServerAnswerError: refused, or no token came.
        """

    @abstractmethod
    async def flush(self) -> None:
        """Empty the cache; the server must be idle.

        Raises:
            ServerAnswerError: it isn't.
        """

    @abstractmethod
    async def tokenise(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text separately, without special tokens.

        Raises:
            ServerAnswerError: the server has no ``/tokenize``.
        """

    async def capability(self) -> Capability:
        """Return the engine's account of itself.

        Raises:
            ServerAnswerError: it has none, as Leyline's plugin isn't installed there, or its
                versions don't fit this release.
        """
        response = await self._http.get(CAPABILITY_PATH)
        if response.status_code != httpx.codes.OK:
            raise ServerAnswerError(f"{CAPABILITY_PATH} answers {response.status_code}")
        capability = msgspec.json.decode(response.content, type=Capability)
        mismatch = judge(capability)
        if mismatch is not None:
            raise ServerAnswerError(f"{mismatch}; to fix it, {mismatch.fix}")
        return capability

    async def record(self, message_id: str) -> TurnRecord:
        """Return the engine's account of a request with an envelope, once it has ended.

        Raises:
            ServerAnswerError: none came.
        """
        deadline = time.monotonic() + _RECEIPT_WAIT_S
        path = RECEIPT_PATH.format(message_id=message_id)
        while time.monotonic() < deadline:
            response = await self._http.get(path)
            if response.status_code == httpx.codes.OK:
                record = msgspec.json.decode(response.content, type=TurnRecord)
                if record.finished:
                    return record
            await asyncio.sleep(0.02)
        raise ServerAnswerError(f"no receipt of {message_id} within {_RECEIPT_WAIT_S:.0f} s")
