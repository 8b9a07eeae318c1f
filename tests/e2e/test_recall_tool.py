"""The recall tool over the whole stack: a scripted model in the real engine, through each API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from recall_kit import (
    ANSWER,
    HEADERS,
    LISTING,
    OTHER,
    TOOLS,
    account,
    asks_once,
    client_of,
    history,
    stack,
    warmed,
)

from leyline_lab.stand_ins.scripted_model import SCRIPTED, Call, Prompt, Reply, build_scripted
from leyline_policies.stubs import ADDRESS, address_of
from leyline_proxy.model.asides import RECALL_TOOL


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripted model's files."""
    return build_scripted(tmp_path_factory.mktemp("scripted"))


def test_chat_recall_is_hidden(files: Path) -> None:
    """The proxy answers the model's call itself: the client sees one answer, and the text's KV is
    copied."""
    with stack(files, asks_once) as (origin, model), client_of(origin) as client:
        warmed(client)
        answer = client.chat.completions.create(
            model=SCRIPTED, messages=history(), tools=TOOLS, extra_headers=HEADERS
        )
        said = answer.choices[0].message
        assert said.tool_calls is None and answer.choices[0].finish_reason == "stop"
        assert (said.content or "").replace(" ", "") == f"Let me look.{ANSWER}".replace(" ", "")
        recall = account(answer)["recall"]
        assert [each["verdict"] for each in recall["calls"]] == ["hit"], recall
        assert recall["calls"][0]["address"] == address_of(LISTING)
        assert len(recall["turns"]) == 1 and recall["offered"] and recall["stopped"] is None
        last = model.turns()[-1]
        assert last.receipt.tokens.reused > 0.9 * recall["calls"][0]["tokens"]


def streamed(client: openai.OpenAI, **more: Any) -> tuple[list[Any], str, list[Any]]:
    """Send the history as a stream; return its chunks, the text, and the calls."""
    chunks = list(
        client.chat.completions.create(
            model=SCRIPTED,
            messages=history(),
            tools=TOOLS,
            extra_headers=HEADERS,
            stream=True,
            stream_options={"include_usage": True},
            **more,
        )
    )
    deltas = [each.choices[0].delta for each in chunks if each.choices]
    text = "".join(delta.content or "" for delta in deltas)
    return chunks, text, [call for delta in deltas for call in delta.tool_calls or ()]


def test_chat_stream_stays_valid(files: Path) -> None:
    """A stream with a recall is one stream: one id, one end, the usage of all turns."""
    with stack(files, asks_once) as (origin, _), client_of(origin) as client:
        warmed(client)
        chunks, text, calls = streamed(client)
        assert (calls, text.replace(" ", "")) == ([], f"Let me look.{ANSWER}".replace(" ", ""))
        assert len({chunk.id for chunk in chunks}) == 1
        ends = [c.choices[0].finish_reason for c in chunks if c.choices]
        assert [each for each in ends if each] == ["stop"]
        recalls = [c.model_extra["leyline"]["recall"] for c in chunks if c.model_extra]
        assert [each["verdict"] for each in recalls[-1]["calls"]] == ["hit"]
        whole = client.chat.completions.create(
            model=SCRIPTED,
            messages=history(),
            tools=TOOLS,
            extra_headers={"x-leyline-session": "w"},
        )
        usage = [chunk.usage for chunk in chunks if chunk.usage][-1]
        assert usage.completion_tokens == whole.usage.completion_tokens
        assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_next_turn_continues_the_aside(files: Path) -> None:
    """The client's next request lacks the exchange, and the engine's prompt still has it: all but
    the new text comes from the cache."""
    with stack(files, asks_once) as (origin, model), client_of(origin) as client:
        warmed(client)
        answer = client.chat.completions.create(
            model=SCRIPTED, messages=history(), tools=TOOLS, extra_headers=HEADERS
        )
        said = answer.choices[0].message.model_dump(include={"role", "content"})
        more = [*history(), said, {"role": "user", "content": "And module 8?"}]
        client.chat.completions.create(
            model=SCRIPTED, messages=more, tools=TOOLS, extra_headers=HEADERS
        )
        *_, before, last = model.turns()
        kept = len(before.prompt) + len(before.kept)
        assert last.shares(before) == kept
        assert last.cached >= kept - 1


def test_a_count_has_the_asides(files: Path) -> None:
    """The count of a request is that of its prompt, with the exchange that the client lacks."""
    with stack(files, asks_once) as (origin, _), client_of(origin) as client:
        warmed(client)
        asked: dict[str, Any] = {"model": SCRIPTED, "tools": TOOLS}
        answer = client.chat.completions.create(messages=history(), extra_headers=HEADERS, **asked)
        said = answer.choices[0].message.model_dump(include={"role", "content"})
        asked["messages"] = [*history(), said, {"role": "user", "content": "And module 8?"}]
        url = f"{origin}/v1/leyline/count_tokens"
        counted = httpx.post(url, json=asked, headers=HEADERS, timeout=60).json()
        sent = client.chat.completions.create(extra_headers=HEADERS, **asked)
        assert counted["input_tokens"] == sent.usage.prompt_tokens


def test_joined_calls_reach_the_client_alone(files: Path) -> None:
    """Of an answer that calls the client's tool as well, the client gets its own call; its result
    and the recalled text come in one prompt."""

    seen: list[Prompt] = []

    def both(prompt: Prompt) -> Reply:
        seen.append(prompt)
        reply = asks_once(prompt)
        if reply.calls:
            return Reply(calls=(*reply.calls, Call("note", {"text": "module 7"})))
        return reply

    with stack(files, both) as (origin, _), client_of(origin) as client:
        warmed(client)
        _, _, calls = streamed(client)
        assert [call.function.name for call in calls] == ["note"] and calls[0].index == 0
        answer = client.chat.completions.create(
            model=SCRIPTED, messages=history(), tools=TOOLS, extra_headers=HEADERS
        )
        own = answer.choices[0].message.tool_calls or []
        assert [call.function.name for call in own] == ["note"]
        said = answer.choices[0].message.model_dump(include={"role", "content", "tool_calls"})
        more = [
            *history(),
            said,
            {"role": "tool", "tool_call_id": own[0].id, "content": "noted"},
        ]
        final = client.chat.completions.create(
            model=SCRIPTED, messages=more, tools=TOOLS, extra_headers=HEADERS
        )
        assert final.choices[0].message.content == ANSWER
        said_calls = [text for role, text in seen[-1].messages if role == "assistant"][-1]
        assert said_calls.index(RECALL_TOOL) < said_calls.index('"note"')
        results = [text for role, text in seen[-1].messages if role == "tool"]
        assert [text.strip() for text in results[-2:]] == [LISTING.strip(), "noted"]


def test_a_model_that_asks_in_circles_is_stopped(files: Path) -> None:
    """Repeated and excess calls are answered with the reason, and then not at all."""

    def circles(prompt: Prompt) -> Reply:
        texts = [text for role, text in prompt.messages if role == "tool"]
        found = next((m for text in texts if (m := ADDRESS.search(text))), None)
        if found is None:
            return Reply("Nothing is missing.")
        return Reply(calls=(Call(RECALL_TOOL, {"address": found[0]}),))

    with stack(files, circles, recall_calls=3) as (origin, _), client_of(origin) as client:
        warmed(client)
        answer = client.chat.completions.create(
            model=SCRIPTED, messages=history(), tools=TOOLS, extra_headers=HEADERS
        )
        recall = account(answer)["recall"]
        causes = [each["cause"] for each in recall["calls"]]
        assert causes == [None, "repeated", "repeated", "limit"]
        assert recall["stopped"] == "limit"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].message.tool_calls is None


@pytest.mark.parametrize(
    ("address", "verdict", "cause"),
    [
        ("sha256:" + "0" * 32, "abstain", "unknown"),
        ("sha256:zz", "abstain", "malformed"),
    ],
)
def test_forged_addresses(files: Path, address: str, verdict: str, cause: str) -> None:
    """An address that the session doesn't have, and one that is none, are answered with why."""

    def forges(prompt: Prompt) -> Reply:
        if any("[not recalled:" in text for _, text in prompt.messages):
            return Reply("I go on without it.")
        return Reply(calls=(Call(RECALL_TOOL, {"address": address}),))

    with stack(files, forges) as (origin, _), client_of(origin) as client:
        answer = client.chat.completions.create(
            model=SCRIPTED, messages=history(), tools=TOOLS, extra_headers=HEADERS
        )
        assert answer.choices[0].message.content == "I go on without it."
        found = account(answer)["recall"]["calls"]
        assert [(each["verdict"], each["cause"]) for each in found] == [(verdict, cause)]


def test_a_long_text_stays_out_with_its_price(files: Path) -> None:
    """A text that exceeds the turn's budget isn't put back, and the account has its price."""

    def asks(prompt: Prompt) -> Reply:
        if any("[not recalled:" in text for _, text in prompt.messages):
            return Reply("I go on without it.")
        return asks_once(prompt)

    with stack(files, asks, recall_tokens=50) as (origin, _), client_of(origin) as client:
        warmed(client)
        answer = client.chat.completions.create(
            model=SCRIPTED, messages=history(), tools=TOOLS, extra_headers=HEADERS
        )
        call = account(answer)["recall"]["calls"][0]
        assert (call["verdict"], call["cause"]) == ("abstain", "over_budget")
        assert call["price_tokens"] > 50


def messages_client(origin: str) -> anthropic.Anthropic:
    """Return a client of the Messages API."""
    return anthropic.Anthropic(base_url=origin, api_key="none", max_retries=0)


def anthropic_history() -> list[dict[str, Any]]:
    """The history in the form of the Messages API."""
    uses = [
        {"type": "tool_use", "id": f"call_{n}", "name": "shell", "input": {"command": f"ls {n}"}}
        for n in range(2)
    ]
    results = [
        {"type": "tool_result", "tool_use_id": f"call_{n}", "content": text}
        for n, text in enumerate((LISTING, OTHER))
    ]
    return [
        {"role": "user", "content": "List the modules, then build them."},
        {"role": "assistant", "content": [uses[0]]},
        {"role": "user", "content": [results[0]]},
        {"role": "assistant", "content": [uses[1]]},
        {"role": "user", "content": [results[1]]},
    ]


@pytest.mark.parametrize("streams", [False, True])
def test_anthropic_sdk(files: Path, streams: bool) -> None:
    """Anthropic's SDK gets the answer as one message, streamed or not."""
    with stack(files, asks_once) as (origin, _), messages_client(origin) as client:
        asked: dict[str, Any] = {
            "model": SCRIPTED,
            "max_tokens": 200,
            "system": "You look into folders. " * 8,
            "tools": [{"name": "shell", "input_schema": {"type": "object"}}],
            "extra_headers": HEADERS,
        }
        client.messages.create(messages=anthropic_history()[:3], **asked)
        if streams:
            with client.messages.stream(messages=anthropic_history(), **asked) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(messages=anthropic_history(), **asked)
        assert [block.type for block in message.content] == ["text"]
        assert message.content[0].text.endswith(ANSWER)
        assert message.stop_reason == "end_turn"


@pytest.mark.parametrize("streams", [False, True])
def test_responses_sdk(files: Path, streams: bool) -> None:
    """OpenAI's Responses API gets one response without the call, streamed or not."""
    with stack(files, asks_once) as (origin, _), client_of(origin) as client:
        items: list[Any] = [{"role": "user", "content": "List the modules, then build them."}]
        for n, text in enumerate((LISTING, OTHER)):
            call = {"type": "function_call", "call_id": f"call_{n}", "name": "shell"}
            items.append({**call, "arguments": json.dumps({"command": f"ls {n}"})})
            items.append({"type": "function_call_output", "call_id": f"call_{n}", "output": text})
        asked: dict[str, Any] = {
            "model": SCRIPTED,
            "tools": [{"type": "function", "name": "shell", "parameters": {"type": "object"}}],
            "extra_headers": HEADERS,
        }
        client.responses.create(input=items[:3], **asked)
        if streams:
            with client.responses.stream(input=items, **asked) as stream:
                response = stream.get_final_response()
        else:
            response = client.responses.create(input=items, **asked)
        assert [item.type for item in response.output] == ["message"]
        assert response.output_text.endswith(ANSWER)


def played(client: openai.OpenAI, session: str, *, stream: bool) -> list[Any]:
    """An agent's session: two tools, a question on the first one's output, a last word."""
    messages: list[Any] = history()[:2]
    for result in (LISTING, OTHER, None):
        asked: dict[str, Any] = {
            "model": SCRIPTED,
            "messages": messages,
            "tools": TOOLS,
            "extra_headers": {"x-leyline-session": session},
        }
        if stream:
            with client.chat.completions.stream(**asked) as events:
                answer = events.get_final_completion()
        else:
            answer = client.chat.completions.create(**asked)
        said = answer.choices[0].message
        kept = {"role": "assistant", "content": said.content}
        if said.tool_calls:
            calls = [
                call.model_dump(include={"id", "type", "function"}) for call in said.tool_calls
            ]
            kept["tool_calls"] = [{**call, "id": f"call_{len(messages)}"} for call in calls]
        messages = [*messages, kept]
        if result is not None:
            called = kept["tool_calls"][0]["id"]
            messages.append({"role": "tool", "tool_call_id": called, "content": result})
    return messages


@pytest.mark.parametrize("stream", [False, True])
def test_a_session_ends_as_without_eviction(files: Path, stream: bool) -> None:
    """With the tool, an agent's messages are to the letter those of a session that lost nothing."""

    def works(prompt: Prompt) -> Reply:
        results = [text for role, text in prompt.messages if role == "tool"]
        if len(results) < 2:
            return Reply(calls=(Call("shell", {"command": f"ls {len(results)}"}),))
        if any(text.strip() == LISTING.strip() for text in results):
            return Reply(ANSWER)
        found = next(m for text in results if (m := ADDRESS.search(text)))
        return Reply(calls=(Call(RECALL_TOOL, {"address": found[0]}),))

    with stack(files, works) as (origin, _), client_of(origin) as client:
        with_recall = played(client, "recall", stream=stream)
    with (
        stack(files, works, recall="off", policy="keep_all") as (origin, _),
        client_of(origin) as client,
    ):
        without = played(client, "whole", stream=stream)
    assert with_recall == without
    assert with_recall[-1]["content"] == ANSWER
