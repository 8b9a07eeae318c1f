"""Requests that real clients send, through the official SDKs and the proxy to a real SGLang.

SGLang lives in an environment of its own (``make sglang-setup``); without it these tests are
skipped.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.client_requests import (
    LATE,
    LINE,
    ClientRequests,
    check_compacts,
    plain,
    results,
)
from support.sglang_stack import MODEL, Proxies, SglangServer


@pytest.fixture(scope="module")
def requests(engine: SglangServer) -> Iterator[ClientRequests]:
    """Clients of a proxy in front of SGLang."""
    with Proxies() as proxies, ClientRequests(proxies.start(engine.base_url), MODEL) as clients:
        yield clients


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_of_0_prefills(requests: ClientRequests, stream: bool) -> None:
    """Each API's answer is empty, and the session's next turn finds all of the prompt."""
    for api in ("chat", "messages", "responses", "completions"):
        warm = requests.prewarm(api, stream=stream)
        assert (warm.text, warm.generated) == ("", 0), api
        assert warm.ended in ("length", "max_tokens", "incomplete"), api
        if api != "completions":
            then = requests.after_prewarm(api, stream=stream)
            # The last token is always computed.
            assert (then.prompt, then.cached) == (warm.prompt, warm.prompt - 1), api
            assert then.generated > 0, api


def test_an_answer_that_was_begun_is_continued(requests: ClientRequests) -> None:
    """The model says the rest of what it says without a beginning, on both APIs."""
    question, call, result, _ = results()["empty"]
    talk = [question, call, {**result, "content": "column=flint"}]
    whole = requests.chat(talk, max_tokens=12)
    begun, rest = whole.text[: (half := whole.text.index(" "))], whole.text[half:]
    assert begun
    assert len(rest) > 4
    words = [*talk, {"role": "assistant", "content": begun}]
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    found = requests.chat(words, max_tokens=12, **flags)
    assert found.text.startswith(rest)
    assert found.prompt < requests.chat(words, max_tokens=12).prompt
    asked = {"role": "user", "content": [{"type": "text", "text": "column=flint"}]}
    told = requests.messages([asked], max_tokens=12)
    begun, rest = told.text[: (half := told.text.index(" "))], told.text[half:]
    words = [asked, {"role": "assistant", "content": begun}]
    assert requests.messages(words, max_tokens=12).text.startswith(rest)


def test_empty_and_null_texts_are_read(requests: ClientRequests) -> None:
    """Calls without a text, and results that are null, empty or an empty list, are one prompt."""
    counted = {name: requests.chat(talk, max_tokens=2).prompt for name, talk in results().items()}
    assert len({*counted.values()}) == 1, counted
    null, empty = (requests.chat(plain(said), max_tokens=2) for said in (None, ""))
    assert (null.text, null.prompt) == (empty.text, empty.prompt)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_late_instructions_are_read(requests: ClientRequests, role: str) -> None:
    """SGLang counts them where they stand, in the words that the template shows."""
    without, late = requests.late(role)
    assert late.prompt - without.prompt >= len(LATE.split())


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_has_both_numbers(requests: ClientRequests, stream: bool) -> None:
    """Each API raises its own error, with the tokens of the prompt and of the window."""
    totals = {}
    for api, totals[api], window, error in requests.too_long(LINE * 1500, stream=stream):
        check_compacts(api, error)
        assert 23_000 > totals[api] > 22_000 > window > 10_000, api
    # The template adds the same to each chat.
    assert totals["chat"] == totals["messages"] == totals["responses"] > totals["completions"]
