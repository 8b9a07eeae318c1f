"""Requests that real clients send, through the official SDKs and the proxy to a real vLLM.

vLLM lives in an environment of its own (``make vllm-setup``); without it these tests are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from support.client_requests import (
    ASKED,
    LATE,
    LINE,
    ClientRequests,
    check_compacts,
    plain,
    results,
)
from support.sglang_stack import API_KEY, Proxies
from vllm_server import BLOCK, VllmServer

MODEL = "leyline-random"
WINDOW = 4096
"""The server's ``--max-model-len``."""


@pytest.fixture(scope="module")
def requests(engine: VllmServer) -> Iterator[ClientRequests]:
    """Clients of a proxy in front of vLLM."""
    with Proxies() as proxies, ClientRequests(proxies.start(engine.base_url), MODEL) as clients:
        yield clients


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_of_0_prefills(requests: ClientRequests, stream: bool) -> None:
    """Each API's answer is empty, and the session's next turn finds the prompt's blocks."""
    for api in ("chat", "messages", "responses", "completions"):
        warm = requests.prewarm(api, stream=stream)
        assert (warm.text, warm.generated) == ("", 0), api
        assert warm.ended in ("length", "max_tokens", "incomplete"), api
        if api != "completions":
            then = requests.after_prewarm(api, stream=stream)
            assert then.cached >= (warm.prompt - 1) // BLOCK * BLOCK > 0, api
            assert then.generated > 0, api


def test_an_answer_that_was_begun_is_continued(
    requests: ClientRequests, engine: VllmServer
) -> None:
    """A message that the client began has the continuation that vLLM itself gives, on both APIs."""
    begun = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": "The value of"}]
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    own = httpx.post(
        f"{engine.base_url}/v1/chat/completions",
        json={"model": MODEL, "messages": begun, "max_tokens": 8, "temperature": 0, **flags},
        headers={"authorization": f"Bearer {API_KEY}"},
        timeout=60,
    ).raise_for_status()
    expected = own.json()["choices"][0]["message"]["content"]
    unlike = requests.chat(begun, max_tokens=8)
    assert expected != unlike.text
    for found in (
        requests.chat(begun, max_tokens=8, **flags),
        requests.messages(begun, max_tokens=8),
    ):
        assert (found.text, found.prompt) == (expected, own.json()["usage"]["prompt_tokens"])


def test_empty_and_null_texts_are_read(requests: ClientRequests) -> None:
    """Calls without a text, and results that are null, empty or an empty list, are one prompt, on
    later turns, too."""
    counted = {name: requests.chat(talk, max_tokens=2).prompt for name, talk in results().items()}
    assert len({*counted.values()}) == 1, counted
    assert requests.chat(plain(None), max_tokens=2).prompt > 0
    assert requests.chat(plain(""), max_tokens=2).prompt > 0


@pytest.mark.parametrize("role", ["system", "developer"])
def test_late_instructions_are_read(requests: ClientRequests, role: str) -> None:
    """vLLM counts them where they stand, in the words that the template shows."""
    without, late = requests.late(role)
    assert late.prompt - without.prompt >= len(LATE.split())


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_has_both_numbers(requests: ClientRequests, stream: bool) -> None:
    """Each API raises its own error. vLLM reads no further than the window's end, so the number is
    the proxy's count; a bare completion, which it doesn't count, has vLLM's."""
    for api, total, window, error in requests.too_long(LINE * 800, stream=stream):
        check_compacts(api, error)
        assert window == WINDOW, (api, error)
        if api == "completions":
            assert total == window + 1, error
        else:
            assert 12_100 > total > 12_000, (api, error)
