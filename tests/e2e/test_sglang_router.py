"""SGLang's own router between proxy and engines: a session stays with one engine by its header."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
from support.engine_http import check_clean
from support.stack import serving

from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import create_embedded_engine

MODEL = "unknown"
"""The router's name for a model whose worker reports nothing."""

SESSIONS, TURNS = 4, 3
START_S = 60.0


@contextmanager
def router(*workers: str) -> Iterator[str]:
    """The origin of a router that pins keyed requests to workers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "sglang_router.launch_router", "--policy", "manual"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
    process = subprocess.Popen(
        [*command, "--worker-urls", *workers],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    origin = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while not _serves(origin):
            assert process.poll() is None and time.monotonic() < deadline, "it did not start"
            time.sleep(0.1)
        yield origin
    finally:
        process.terminate()
        process.wait(30)


def _serves(origin: str) -> bool:
    try:
        answer = httpx.get(f"{origin}/v1/models", timeout=5)
    except httpx.HTTPError:
        return False
    return answer.status_code == httpx.codes.OK and MODEL in answer.text


def cached_by_turn(origin: str, tag: str) -> list[list[float]]:
    """Per session and turn, the share of the prompt that the engine had."""
    found = []
    with httpx.Client(base_url=origin, timeout=60) as client:
        for session in range(SESSIONS):
            messages: list[dict[str, Any]] = [
                {"role": "user", "content": f"{tag}: tell me of number {session}. " * 8}
            ]
            shares = []
            for _ in range(TURNS):
                body = {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0}
                headers = {"x-leyline-session": f"{tag}-{session}"}
                answer = client.post("/v1/chat/completions", json=body, headers=headers)
                assert answer.status_code == 200, answer.text
                usage = answer.json()["usage"]
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                shares.append(cached / usage["prompt_tokens"])
                messages += [
                    answer.json()["choices"][0]["message"],
                    {"role": "user", "content": "Go on, please."},
                ]
            found.append(shares)
    return found


def test_sessions_find_their_kv_behind_a_router_that_reads_the_affinity_header() -> None:
    """Each later turn finds what the turn before computed; without the header, some don't."""
    options = {"device": "cpu", "pool_tokens": 16_384, "served_name": MODEL}
    with ExitStack() as stack:
        engines = [create_embedded_engine("replay", options) for _ in range(3)]
        origins = [stack.enter_context(serving(engine)) for engine in engines]
        between = stack.enter_context(router(*origins))

        def proxy(header: str | None) -> str:
            app = create_app(Settings(upstream=between, affinity_header=header, log_level="error"))
            return stack.enter_context(serving(app))

        keyed = cached_by_turn(proxy("x-smg-routing-key"), "keyed")
        bare = cached_by_turn(proxy(None), "bare")
    for engine in engines:
        check_clean(engine)
    assert all(share > 0.7 for shares in keyed for share in shares[1:]), keyed
    assert any(share < 0.3 for shares in bare for share in shares[1:]), bare
