"""A streaming client of SGLang's ``/generate`` that times the first token."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import msgspec

from leyline_engine.contract import EditPayload, ReusePayload, edit_envelope

from ..errors import ServerAnswerError
from .client import TOP, BenchClient, ServerAnswer, TokenLogprobs


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
        content = json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        started = time.perf_counter()
        first: float | None = None
        last = ""
        async with self._http.stream(
            "POST", "/generate", content=content, headers=headers
        ) as response:
            if response.status_code != httpx.codes.OK:
                said = (await response.aread()).decode(errors="replace")
                raise ServerAnswerError(f"/generate answers {response.status_code}: {said[:300]}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                first = first or time.perf_counter()
                last = line.removeprefix("data: ")
        ended = time.perf_counter()
        if first is None:
            raise ServerAnswerError("/generate ended without a token")
        return _answer(json.loads(last), 1e3 * (first - started), 1e3 * (ended - started))

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
        response = await self._http.post("/generate", json=body)
        if response.status_code != httpx.codes.OK:
            raise ServerAnswerError(
                f"/generate answers {response.status_code}: {response.text[:300]}"
            )
        # The first entry is the last prompt token's, which nothing before it is asked about.
        found = response.json()["meta_info"].get("input_top_logprobs", ())[1:]
        if len(found) != len(answer):
            raise ServerAnswerError(f"{len(found)} distributions came for {len(answer)} tokens")
        return [{token: logprob for logprob, token, _ in step} for step in found]

    async def flush(self) -> None:
        """Empty the cache; the server must be idle.

        Raises:
            ServerAnswerError: it isn't.
        """
        response = await self._http.post("/flush_cache", params={"timeout": 30})
        if response.status_code != httpx.codes.OK:
            raise ServerAnswerError(f"the cache was not flushed: {response.text[:300]}")

    async def tokenise(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text separately, without special tokens.

        Raises:
            ServerAnswerError: the server has no ``/tokenize``.
        """
        body = {"prompt": list(texts), "add_special_tokens": False}
        response = await self._http.post("/tokenize", json=body)
        if response.status_code != httpx.codes.OK:
            raise ServerAnswerError(f"/tokenize answers {response.status_code}")
        tokens: list[list[int]] = response.json()["tokens"]
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
