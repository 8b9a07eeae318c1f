"""A streaming client of vLLM's ``/v1/completions`` that times the first token."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import msgspec

from leyline_engine.contract import EditPayload, edit_envelope

from ..errors import ServerAnswerError
from .client import TOP, BenchClient, ServerAnswer, StepLogprobs

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
        content = json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        arriving = _Arriving()
        started = time.perf_counter()
        first: float | None = None
        async with self._http.stream("POST", _PATH, content=content, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                said = (await response.aread()).decode(errors="replace")
                raise ServerAnswerError(f"{_PATH} answers {response.status_code}: {said[:300]}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    first = first or time.perf_counter()
                    arriving.add(json.loads(line.removeprefix("data: ")))
        ended = time.perf_counter()
        if first is None:
            raise ServerAnswerError(f"{_PATH} ended without a token")
        return arriving.answer(1e3 * (first - started), 1e3 * (ended - started))

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
        response = await self._http.post("/tokenize", json=body)
        if response.status_code != httpx.codes.OK:
            raise ServerAnswerError(f"/tokenize answers {response.status_code}")
        tokens: list[int] = response.json()["tokens"]
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
