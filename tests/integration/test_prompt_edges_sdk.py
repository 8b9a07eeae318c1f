"""Prompts at the edges, through the official SDKs: too long for the model, and without an answer.

The embedded engine answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from support.overflow_words import ANTHROPIC_CLIENTS, OPENAI_CLIENTS
from support.stack import embedded_stack

RECALL = "leyline-recall"
CODE = "context_length_exceeded"
LONG = "A line of a file that is far too long for the model.\n" * 300
"""Longer than the window."""
TOO_MUCH = 1_000_000
"""Tokens of an answer that no window holds."""
SYSTEM = "You are an agent that looks into folders. " * 6


@pytest.fixture(scope="module")
def origin() -> Iterator[str]:
    """Proxy and embedded engine."""
    options = {"pool_tokens": 2048, "device": "cpu"}
    with embedded_stack(options, log_level="error") as address:
        yield address


@pytest.fixture(scope="module")
def claude(origin: str) -> Iterator[anthropic.Anthropic]:
    """Anthropic's client."""
    with anthropic.Anthropic(base_url=origin, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def gpt(origin: str) -> Iterator[openai.OpenAI]:
    """OpenAI's client."""
    with openai.OpenAI(base_url=f"{origin}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("text", "limit"), [("hi", TOO_MUCH), (LONG, 8)])
def test_anthropics_clients_compact(
    claude: anthropic.Anthropic, text: str, limit: int, stream: bool
) -> None:
    """The SDK raises the error whose text they look for, with both numbers."""
    talk: Any = [{"role": "user", "content": text}]
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(
            model=RECALL, max_tokens=limit, messages=talk, stream=stream, timeout=60
        )
    body: Any = caught.value.body
    message = body["error"]["message"]
    assert message.startswith("prompt is too long: ")
    figures = message.partition("(")[0].split()
    total, window = (int(word) for word in figures if word.isdigit())
    assert total > window
    assert total >= limit
    for client in ANTHROPIC_CLIENTS:
        assert client.recognises(400, body["error"]["type"], message), client.name


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["chat", "completions", "responses"])
def test_openais_clients_compact(gpt: openai.OpenAI, api: str, stream: bool) -> None:
    """The SDK raises the error with the code that they look for."""
    with pytest.raises(openai.BadRequestError) as caught:
        if api == "chat":
            talk: Any = [{"role": "user", "content": LONG}]
            gpt.chat.completions.create(model=RECALL, messages=talk, stream=stream)
        elif api == "completions":
            gpt.completions.create(model=RECALL, prompt=LONG, stream=stream)
        else:
            gpt.responses.create(model=RECALL, input=LONG, stream=stream)
    error = caught.value
    assert (error.code, error.type) == (CODE, "invalid_request_error")
    for client in OPENAI_CLIENTS:
        assert client.recognises(400, error.code, error.message), client.name


def ask(client: anthropic.Anthropic, text: str, *, stream: bool = False, **options: Any) -> Any:
    """A message, whole or put together by the SDK; ``first`` is its usage when it begins."""
    request: dict[str, Any] = {
        "model": RECALL,
        "system": SYSTEM,
        "messages": [{"role": "user", "content": text}],
        **options,
    }
    if not stream:
        return client.messages.create(**request), None
    with client.messages.stream(**request) as events:
        started = [event.message.usage for event in events if event.type == "message_start"]
        return events.get_final_message(), started[0].model_copy()


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_prewarm(claude: anthropic.Anthropic, stream: bool) -> None:
    """The prompt is cached for the next turn, which has the answer of one without a pre-warm."""
    session = {"x-leyline-session": f"warm-{stream}"}
    text = f"Look around, streamed: {stream}."
    warm, _ = ask(claude, text, stream=stream, max_tokens=0, extra_headers=session)
    assert (warm.content, warm.stop_reason, warm.usage.output_tokens) == ([], "max_tokens", 0)
    prompt = warm.usage.input_tokens + warm.usage.cache_read_input_tokens
    assert prompt > 50
    options: dict[str, Any] = {"max_tokens": 12, "extra_body": {"temperature": 0}}
    then, _ = ask(claude, text, stream=stream, extra_headers=session, **options)
    assert then.usage.cache_read_input_tokens >= prompt - 16
    other = {"x-leyline-session": f"other-{stream}"}
    fresh, _ = ask(claude, text, extra_headers=other, **options)
    assert [block.text for block in then.content] == [block.text for block in fresh.content]
    assert then.content[0].text


def test_a_prewarm_with_a_placeholder_serves_the_question(claude: anthropic.Anthropic) -> None:
    """A session whose first turn had another question splices or prefills to the same answer."""
    session = {"x-leyline-session": "placeholder"}
    options: dict[str, Any] = {"max_tokens": 12, "extra_body": {"temperature": 0}}
    ask(claude, "warm-up", max_tokens=0, extra_headers=session)
    then, _ = ask(claude, "What is in the folder?", extra_headers=session, **options)
    fresh, _ = ask(claude, "What is in the folder?", **options)
    assert then.content == fresh.content
    assert then.usage.cache_read_input_tokens > 40


@pytest.mark.parametrize("stream", [False, True])
def test_openais_prewarm(gpt: openai.OpenAI, stream: bool) -> None:
    """Chat ends with ``length``, a response is incomplete, and both are empty; the response can be
    continued."""
    talk: Any = [{"role": "user", "content": f"Warm, streamed: {stream}."}]
    for limit in ("max_tokens", "max_completion_tokens"):
        request: dict[str, Any] = {"model": RECALL, "messages": talk, limit: 0}
        if stream:
            options = {"include_usage": True}
            chunks = [*gpt.chat.completions.create(**request, stream=True, stream_options=options)]
            ends = [c.choices[0].finish_reason for c in chunks if c.choices]
            assert [end for end in ends if end] == ["length"]
            assert not any(c.choices[0].delta.content for c in chunks if c.choices)
            usage = chunks[-1].usage
        else:
            answer = gpt.chat.completions.create(**request)
            assert answer.choices[0].finish_reason == "length"
            assert not answer.choices[0].message.content
            usage = answer.usage
        assert usage.completion_tokens == 0
        assert usage.prompt_tokens > 0
    asked: dict[str, Any] = {"model": RECALL, "input": talk, "max_output_tokens": 0}
    if stream:
        response = [*gpt.responses.create(**asked, stream=True)][-1].response
    else:
        response = gpt.responses.create(**asked)
    assert (response.status, response.output) == ("incomplete", [])
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.output_tokens == 0
    more = gpt.responses.create(
        model=RECALL,
        input="Go on.",
        previous_response_id=response.id,
        max_output_tokens=8,
    )
    assert more.usage is not None
    assert more.usage.output_tokens > 0
    assert more.usage.input_tokens_details.cached_tokens > 0


def test_a_stream_begins_with_the_prompts_tokens(claude: anthropic.Anthropic) -> None:
    """``message_start`` has the counts as planned, which those at the end confirm: on the first
    turn, and on one that finds the cache."""
    talk: list[dict[str, Any]] = [{"role": "user", "content": "How many tokens does this have?"}]
    for cached in (False, True):
        final, started = ask(claude, "", stream=True, max_tokens=4, messages=talk)
        assert started is not None
        total = final.usage.input_tokens + final.usage.cache_read_input_tokens
        assert started.input_tokens + started.cache_read_input_tokens == total
        assert (started.cache_read_input_tokens > 0) is cached
        assert started.output_tokens == 0
        said = [block.model_dump(include={"type", "text"}) for block in final.content]
        talk += [{"role": "assistant", "content": said}, {"role": "user", "content": "Again."}]
