"""Streaming clients of the benchmarks' servers, SGLang and vLLM, that time the first token."""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from leyline_engine.contract import (
    CAPABILITY_PATH,
    RECEIPT_PATH,
    Capability,
    EditPayload,
    ReusePayload,
    TurnRecord,
    edit_envelope,
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

    async def _timed(
        self, path: str, body: Mapping[str, Any], take: Callable[[str], None]
    ) -> tuple[float, float]:
        """Send a request that is answered in events; return the ms to the first and to the end.

        Args:
            take: called with the JSON of each event.

        Raises:
            ServerAnswerError: refused, or no token came.
        """
        content = json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        started = time.perf_counter()
        first: float | None = None
        async with self._http.stream("POST", path, content=content, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                said = (await response.aread()).decode(errors="replace")
                raise ServerAnswerError(f"{path} answers {response.status_code}: {said[:300]}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    first = first or time.perf_counter()
                    take(line.removeprefix("data: "))
        ended = time.perf_counter()
        if first is None:
            raise ServerAnswerError(f"{path} ended without a token")
        return 1e3 * (first - started), 1e3 * (ended - started)

    async def _asked(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JSON of an answer.

        Raises:
            ServerAnswerError: refused.
        """
        response = await self._http.post(path, json=body)
        if response.status_code != httpx.codes.OK:
            raise ServerAnswerError(f"{path} answers {response.status_code}: {response.text[:300]}")
        document: dict[str, Any] = response.json()
        return document

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


_PATH = "/v1/completions"


class CompletionsClient(BenchClient):
    """Sends prompts of token ids to one vLLM server; must be closed at the end."""

    async def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        salt: str,
        message_id: str = "",
        payload: EditPayload | None = None,
    ) -> ServerAnswer:
        """Return greedy tokens, past any end of sequence; see :meth:`BenchClient.generate`."""
        body: dict[str, Any] = {
            "prompt": list(prompt),
            "max_tokens": max_new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": TOP,
            "cache_salt": salt,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if payload is not None:
            hints = msgspec.to_builtins(edit_envelope(message_id, payload))
            body["custom_params"] = {"kv_hints": hints}
        arriving = _Arriving()
        return arriving.answer(
            *await self._timed(_PATH, body, lambda text: arriving.add(json.loads(text)))
        )

    async def flush(self) -> None:
        """Empty the cache; see :meth:`BenchClient.flush`."""
        response = await self._http.post("/reset_prefix_cache")
        if response.status_code == httpx.codes.NOT_FOUND:
            raise ServerAnswerError(
                "the cache can't be emptied: start vLLM with VLLM_SERVER_DEV_MODE=1"
            )
        if response.status_code != httpx.codes.OK or not response.json().get("success"):
            raise ServerAnswerError(f"the cache was not flushed: {response.text[:300]}")

    async def tokenise(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text; see :meth:`BenchClient.tokenise`."""
        return [await self._tokens(text) for text in texts]

    async def _tokens(self, text: str) -> list[int]:
        body = {"prompt": text, "add_special_tokens": False}
        tokens: list[int] = (await self._asked("/tokenize", body))["tokens"]
        return tokens


class _Arriving:
    """An answer in pieces."""

    def __init__(self) -> None:
        self._output: list[int] = []
        self._chosen: list[str] = []
        self._top: list[StepLogprobs] = []
        self._usage: Mapping[str, Any] = {}

    def add(self, event: Mapping[str, Any]) -> None:
        """Take the next event.

        Raises:
            ServerAnswerError: it reports an error.
        """
        if "error" in event:
            raise ServerAnswerError(f"{_PATH} breaks off: {json.dumps(event)[:300]}")
        self._usage = event.get("usage") or self._usage
        for choice in event["choices"]:
            self._output += choice.get("token_ids") or ()
            found = choice.get("logprobs") or {}
            self._chosen += found.get("tokens", ())
            self._top += found.get("top_logprobs", ())

    def answer(self, ttft_ms: float, e2e_ms: float) -> ServerAnswer:
        """Return what came.

        Raises:
            ServerAnswerError: no usage did.
        """
        if not self._usage:
            raise ServerAnswerError(f"{_PATH} breaks off without its usage")
        details = self._usage.get("prompt_tokens_details") or {}
        return ServerAnswer(
            ttft_ms=ttft_ms,
            e2e_ms=e2e_ms,
            prompt_tokens=self._usage["prompt_tokens"],
            cached_tokens=details.get("cached_tokens") or 0,
            output=tuple(self._output),
            chosen=tuple(self._chosen),
            top=tuple(self._top),
        )


class GenerateClient(BenchClient):
    """Sends prompts of token ids to one SGLang server; must be closed at the end."""

    async def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        salt: str,
        message_id: str = "",
        payload: EditPayload | None = None,
        reuse: ReusePayload | None = None,
        logprobs: bool = True,
    ) -> ServerAnswer:
        """Return greedy tokens, past any end of sequence.

        Args:
            salt: namespace of the cache that the request sees.
            payload: sent in an envelope under ``message_id``; None sends no envelope.
            reuse: the request for reuse, beside the payload.
            logprobs: True to ask for the likeliest tokens.

        Raises:
            ServerAnswerError: refused, or no token came.
        """
        body = {
            "input_ids": list(prompt),
            "sampling_params": _sampling(max_new_tokens, message_id, payload, reuse),
            "cache_salt": salt,
            "stream": True,
        }
        if logprobs:
            body |= {
                "return_logprob": True,
                "top_logprobs_num": TOP,
                "return_text_in_logprobs": True,
            }
        lines: deque[str] = deque(maxlen=1)
        times = await self._timed("/generate", body, lines.append)
        return _answer(json.loads(lines[0]), *times)

    async def score(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        likeliest: int,
        *,
        salt: str,
        message_id: str = "",
        payload: EditPayload | None = None,
    ) -> list[TokenLogprobs]:
        """Return the distribution at each token of an answer that is given.

        Args:
            likeliest: number of tokens per distribution; at most the vocabulary.

        Other arguments as for :meth:`generate`.

        Raises:
            ServerAnswerError: refused, or without distributions.
        """
        body = {
            "input_ids": [*prompt, *answer],
            "sampling_params": _sampling(1, message_id, payload),
            "cache_salt": salt,
            "return_logprob": True,
            "logprob_start_len": len(prompt) - 1,
            "top_logprobs_num": likeliest,
        }
        answered = await self._asked("/generate", body)
        # The first entry is the last prompt token's, which nothing before it is asked about.
        found = answered["meta_info"].get("input_top_logprobs", ())[1:]
        if len(found) != len(answer):
            raise ServerAnswerError(f"{len(found)} distributions came for {len(answer)} tokens")
        return [{token: logprob for logprob, token, _ in step} for step in found]

    async def flush(self) -> None:
        """Empty the cache; see :meth:`BenchClient.flush`."""
        response = await self._http.post("/flush_cache", params={"timeout": 30})
        if response.status_code != httpx.codes.OK:
            raise ServerAnswerError(f"the cache was not flushed: {response.text[:300]}")

    async def tokenise(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text; see :meth:`BenchClient.tokenise`."""
        body = {"prompt": list(texts), "add_special_tokens": False}
        tokens: list[list[int]] = (await self._asked("/tokenize", body))["tokens"]
        return tokens


def _sampling(
    max_new_tokens: int,
    message_id: str,
    payload: EditPayload | None,
    reuse: ReusePayload | None = None,
) -> dict[str, Any]:
    """Return parameters for greedy tokens, with the envelope if there is a payload."""
    sampling: dict[str, Any] = {
        "temperature": 0,
        "max_new_tokens": max_new_tokens,
        "ignore_eos": True,
    }
    if payload is not None:
        hints = msgspec.to_builtins(edit_envelope(message_id, payload, reuse=reuse))
        sampling["custom_params"] = {"kv_hints": hints}
    return sampling


def _answer(event: Mapping[str, Any], ttft_ms: float, e2e_ms: float) -> ServerAnswer:
    if "meta_info" not in event:
        raise ServerAnswerError(f"/generate breaks off: {json.dumps(event)[:300]}")
    meta = event["meta_info"]
    return ServerAnswer(
        ttft_ms=ttft_ms,
        e2e_ms=e2e_ms,
        prompt_tokens=meta["prompt_tokens"],
        cached_tokens=meta["cached_tokens"],
        output=tuple(event["output_ids"]),
        chosen=tuple(text for _, _, text in meta.get("output_token_logprobs", ())),
        top=tuple(
            {text: logprob for logprob, _, text in step}
            for step in meta.get("output_top_logprobs", ())
        ),
    )
