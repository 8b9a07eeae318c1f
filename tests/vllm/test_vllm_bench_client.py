"""The benchmarks' client of vLLM, against vLLM's own server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from vllm_server import API_KEY, VllmServer

from leyline_engine.contract import EditPayload
from leyline_lab.errors import ServerAnswerError
from leyline_lab.three_arm.clients import TOP, CompletionsClient

T = TypeVar("T")
PROMPT = list(range(100, 180))


def with_client(server: VllmServer, act: Callable[[CompletionsClient], Awaitable[T]]) -> T:
    """The result of ``act``, with a client that is closed afterwards."""

    async def run() -> T:
        client = CompletionsClient(server.base_url, API_KEY)
        try:
            return await act(client)
        finally:
            await client.close()

    return asyncio.run(run())


def test_an_answer_has_its_tokens_times_and_likeliest(vllm_server: VllmServer) -> None:
    """A prompt of token ids: all that the benchmark counts comes with the stream."""
    answer = with_client(vllm_server, lambda c: c.generate(PROMPT, 6, salt="answer"))
    assert (answer.prompt_tokens, answer.cached_tokens) == (len(PROMPT), 0)
    assert len(answer.output) == len(answer.chosen) == len(answer.top) == 6
    assert all(len(step) <= TOP + 1 for step in answer.top) and answer.top[0]
    assert 0 < answer.ttft_ms < answer.e2e_ms


def test_salts_keep_caches_apart(vllm_server: VllmServer) -> None:
    """The same salt finds the prompt's whole blocks, another one nothing."""

    async def ask(client: CompletionsClient) -> list[int]:
        found = [await client.generate(PROMPT, 2, salt=salt) for salt in ("a", "a", "b")]
        return [answer.cached_tokens for answer in found]

    assert with_client(vllm_server, ask) == [0, 64, 0]


def test_an_envelope_comes_back_as_a_record(vllm_server: VllmServer) -> None:
    """The payload reaches the scheduler's side under its message's name."""
    payload = EditPayload(session="bench", scope="t", turn="t0")

    async def ask(client: CompletionsClient) -> str:
        await client.generate(PROMPT, 2, salt="c", message_id="bench.t0", payload=payload)
        return (await client.record("bench.t0")).receipt.message_id

    assert with_client(vllm_server, ask) == "bench.t0"


def test_texts_are_tokenised_one_by_one(vllm_server: VllmServer) -> None:
    """Each text gets its own tokens, without special ones."""
    first, again, other = with_client(
        vllm_server, lambda c: c.tokenise(["a cache", "a cache", "another"])
    )
    assert first == again != other


def test_what_a_server_refuses_is_told(vllm_server: VllmServer) -> None:
    """A prompt that is too long, and a cache that can't be emptied without the development mode."""
    with pytest.raises(ServerAnswerError, match="answers 400"):
        with_client(vllm_server, lambda c: c.generate([100] * 5000, 1, salt="d"))
    with pytest.raises(ServerAnswerError, match="VLLM_SERVER_DEV_MODE=1"):
        with_client(vllm_server, lambda c: c.flush())
