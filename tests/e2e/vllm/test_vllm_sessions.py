"""An agent's session through the proxy in front of a real vLLM: spliced, streamed and whole.

vLLM lives in an environment of its own (``make vllm-setup``); without it these tests are skipped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.agent_history import agent_history
from support.sglang_stack import Proxies
from support.waiting import wait

REPOSITORY = Path(__file__).resolve().parents[3]
PYTHON = REPOSITORY / ".venv-vllm" / "bin" / "python"
sys.path.insert(0, str(REPOSITORY / "tests" / "vllm" / "support"))

from vllm_server import BLOCK, VllmServer  # noqa: E402 - it lies beside the plugin's own tests

CHAT = "/v1/chat/completions"
MODEL = "leyline-random"
POLICY = "truncate_older_than:n=2,max_chars=80"
Messages = list[dict[str, Any]]


@pytest.fixture(scope="module")
def origin(engine: VllmServer) -> Iterator[str]:
    """A proxy in front of it, with a policy that cuts old outputs."""
    with Proxies() as proxies:
        yield proxies.start(engine.base_url, policy=POLICY, edit_timing="now")


def upstream(origin: str) -> dict[str, Any]:
    """The engine's status in ``/readyz``."""
    found: dict[str, Any] = httpx.get(f"{origin}/readyz", timeout=60).json()["upstreams"][0]
    return found


def turn(origin: str, session: str, messages: Messages, **members: Any) -> httpx.Response:
    """One turn of a session."""
    body = {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0, **members}
    headers = {"x-leyline-session": session}
    answer = httpx.post(f"{origin}{CHAT}", json=body, headers=headers, timeout=120)
    return answer.raise_for_status()


def accounted(answer: httpx.Response) -> tuple[dict[str, Any], dict[str, Any]]:
    """An answer's account and its usage, streamed or whole."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json()["leyline"], answer.json()["usage"]
    *events, end = [line[6:] for line in answer.text.split("\n\n") if line]
    assert end == "[DONE]"
    chunks = [json.loads(event) for event in events]
    (account,) = (chunk["leyline"] for chunk in chunks if "leyline" in chunk)
    (usage,) = (chunk["usage"] for chunk in chunks if chunk.get("usage"))
    return account, usage


def test_the_handshake_finds_vllm(origin: str) -> None:
    """It splices, and the proxy renders prompts itself, proven equal."""
    found = upstream(origin)
    assert (found["engine"], found["splices"], found["obstacle"]) == ("vllm", True, ""), found
    assert (found["rendering"], found["rendering_problem"]) == ("local", "")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_truncated_output_is_spliced(origin: str, stream: bool) -> None:
    """Each edited turn is spliced, and the usage counts its copies as cached."""
    session = f"stream {stream}"
    members = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    for turns in range(1, 6):
        history = agent_history(turns, session, secret="", lines=16)
        answer = turn(origin, session, history, **members)
        assert "leyline_record" not in answer.text
        account, usage = accounted(answer)
        tokens = account["tokens"]
        assert tokens["prompt"] == usage["prompt_tokens"]
        assert tokens["prompt"] == tokens["prefix"] + tokens["spliced"] + tokens["prefilled"]
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        assert cached == tokens["prefix"] + tokens["spliced"]
        if turns > 2:
            assert account["reason"] == "spliced", account
            assert tokens["spliced"] > BLOCK


def test_spliced_kv_is_private(engine: VllmServer, origin: str) -> None:
    """A proxy that doesn't splice sends the same edited prompt: only its exact prefix is cached."""
    histories = [agent_history(turns, "private", secret="", lines=16) for turns in (3, 4)]
    for history in histories:
        spliced = turn(origin, "private", history).json()
    tokens, (edit,) = spliced["leyline"]["tokens"], spliced["leyline"]["edits"]
    assert spliced["leyline"]["reason"] == "spliced"
    with Proxies() as proxies:
        plain = proxies.start(engine.base_url, policy=POLICY, edit_timing="now", splice=False)
        answer = turn(plain, "private", histories[-1]).json()
    assert answer["usage"]["prompt_tokens"] == spliced["usage"]["prompt_tokens"]
    assert answer["choices"][0]["finish_reason"] == "length"
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    # The text in place of the cut output is computed after the exact prefix only.
    exact = edit["span"][0] + edit["replacement_tokens"]
    assert BLOCK <= cached <= exact < tokens["prefix"] + tokens["spliced"]


@pytest.mark.nightly
def test_sessions_survive_a_crash(engine: VllmServer, origin: str) -> None:
    """After a restart of vLLM the next edited turn is a prefill, and the one after is spliced."""
    before, during, after, later = (
        agent_history(turns, "crash", secret="", lines=16) for turns in (3, 4, 5, 6)
    )
    turn(origin, "crash", before)
    assert turn(origin, "crash", during).json()["leyline"]["reason"] == "spliced"
    engine.kill()
    engine.start()
    wait(lambda: upstream(origin)["splices"])
    account = turn(origin, "crash", after).json()["leyline"]
    assert account["reason"] == "missing_source"
    assert account["tokens"]["spliced"] == 0
    assert turn(origin, "crash", later).json()["leyline"]["reason"] == "spliced"
