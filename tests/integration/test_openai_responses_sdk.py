"""The OpenAI SDK's Responses API, unmodified, against the proxy on loopback.

Sessions run on the embedded engine; where the model has to think or to call tools, a scripted
engine answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from support.fake_engine import DONE, MODEL, Answer, FakeEngine, chat_json, chunk
from support.stack import embedded_stack

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings

RECALL = "leyline-recall"
INSTRUCTIONS = "You are an agent that looks into folders. " * 6
LISTING = "".join(f"{number:04d} drwxr-xr-x build/module_{number}\n" for number in range(20))
LS: dict[str, Any] = {
    "type": "function",
    "name": "ls",
    "description": "List a folder.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    "strict": False,
}
PATCH: dict[str, Any] = {"type": "custom", "name": "apply_patch", "format": {"type": "text"}}
DROPPED = ("declared", "amortize")
Items = list[dict[str, Any]]


@pytest.fixture(scope="module")
def origin() -> Iterator[str]:
    """Proxy and embedded engine."""
    options = {"pool_tokens": 32_768, "device": "cpu"}
    with embedded_stack(options, log_level="error") as address:
        yield address


@pytest.fixture(scope="module")
def sdk(origin: str) -> Iterator[openai.OpenAI]:
    """A client that knows nothing but the address."""
    with client_of(origin) as client:
        yield client


def client_of(address: str, **options: Any) -> openai.OpenAI:
    """The SDK's client, without retries that would hide a failure."""
    given = {"api_key": "none", "max_retries": 0, **options}
    return openai.OpenAI(base_url=f"{address}/v1", **given)


@contextmanager
def scripted(engine: FakeEngine, **settings: Any) -> Iterator[str]:
    """The origin of a proxy before a scripted engine."""
    app = create_app(Settings(log_level="error", **settings), engine_app=engine)
    with serving(app) as address:
        yield address


def ask(sdk: openai.OpenAI, items: Any, *, stream: bool, **options: Any) -> Any:
    """One turn, whole or put together by the SDK from its events."""
    request: dict[str, Any] = {
        "model": RECALL,
        "instructions": INSTRUCTIONS,
        "input": items,
        "tools": [LS],
        "max_output_tokens": 8,
        **options,
    }
    if not stream:
        return sdk.responses.create(**request)
    with sdk.responses.stream(**request) as events:
        found = list(events)
    assert [event.sequence_number for event in found] == list(range(len(found)))
    return found[-1].response


def account(response: Any) -> dict[str, Any]:
    """The member ``leyline`` of a response."""
    found: dict[str, Any] = response.leyline
    return found


def cached(response: Any) -> int:
    """Tokens that weren't prefilled."""
    found: int = response.usage.input_tokens_details.cached_tokens
    return found


def asked(text: str) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": text}


def looked(turn: int) -> Items:
    """A call that the model might have made, and its result."""
    call = {"type": "function_call", "call_id": f"call_{turn}", "name": "ls"}
    result = {"type": "function_call_output", "call_id": f"call_{turn}"}
    arguments = json.dumps({"path": str(turn)})
    return [{**call, "arguments": arguments}, {**result, "output": f"{turn}\n{LISTING}"}]


def result(kind: str, call_id: str, output: str) -> dict[str, Any]:
    """The output item of a call."""
    return {"type": kind, "call_id": call_id, "output": output}


def said(response: Any) -> Items:
    """Its output as input items."""
    return [item.model_dump(exclude_none=True) for item in response.output]


@pytest.mark.parametrize("stream", [False, True])
def test_a_session_that_sends_its_history_is_recognised_and_cached(
    sdk: openai.OpenAI, stream: bool
) -> None:
    """Each turn, without any configuration, reads from the cache all that the one before sent, and
    the counts are the engine's."""
    items: Items = [asked(f"Look around, streamed: {stream}.")]
    sessions, prompts = set(), [0]
    for turn in range(4):
        counted = sdk.responses.input_tokens.count(
            model=RECALL,
            instructions=INSTRUCTIONS,
            input=items,  # type: ignore[arg-type]
            tools=[LS],  # type: ignore[list-item]
        )
        response = ask(sdk, items, stream=stream, store=False)
        assert response.usage.input_tokens == counted.input_tokens
        if turn:
            assert cached(response) >= prompts[-1] - 16
        sessions.add(account(response)["session"])
        assert account(response)["turn_index"] == turn
        prompts.append(counted.input_tokens)
        items += [*said(response), *looked(turn)]
    assert len(sessions) == 1
    assert prompts == sorted(set(prompts))


@pytest.mark.parametrize("stream", [False, True])
def test_a_session_goes_on_from_stored_responses(sdk: openai.OpenAI, stream: bool) -> None:
    """Only what is new is sent; the prompt is that of the whole conversation, and a client that
    sends all of it has the same one."""
    items: Items = [asked(f"Look around, stored, streamed: {stream}.")]
    whole, previous, sent = list(items), None, 0
    for turn in range(3):
        response = ask(sdk, items, stream=stream, previous_response_id=previous)
        counted = sdk.responses.input_tokens.count(
            model=RECALL,
            instructions=INSTRUCTIONS,
            input=whole,  # type: ignore[arg-type]
            tools=[LS],  # type: ignore[list-item]
        )
        assert response.usage.input_tokens == counted.input_tokens
        assert cached(response) >= sent - 16
        assert account(response)["turn_index"] == turn
        items = looked(turn)
        whole += [*said(response), *items]
        previous, sent = response.id, counted.input_tokens
    stored = sdk.responses.retrieve(response.id)
    assert stored.model_dump(exclude={"output"}) == response.model_dump(exclude={"output"})
    assert said(stored)[0]["content"][0]["text"] == response.output_text
    listed = list(sdk.responses.input_items.list(response.id, order="asc", limit=2))
    kinds = [item.type for item in listed]
    looks = ["message", "function_call", "function_call_output"]
    assert kinds == ["message", *looks, *looks]
    assert len({item.id for item in listed}) == len(listed)
    sdk.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError) as lost:
        ask(sdk, items, stream=stream, previous_response_id=previous)
    assert (lost.value.code, lost.value.param) == (
        "previous_response_not_found",
        "previous_response_id",
    )


def test_new_instructions_stay_in_the_session(sdk: openai.OpenAI) -> None:
    """They aren't carried over from the response that a request continues."""
    first = ask(sdk, "Look.", stream=False)
    second = ask(sdk, "Go on.", stream=False, previous_response_id=first.id, instructions="Short.")
    third = ask(sdk, "Go on.", stream=False, previous_response_id=second.id, instructions=None)
    assert account(first)["session"] == account(second)["session"] == account(third)["session"]
    assert second.usage.input_tokens < first.usage.input_tokens
    assert [account(each)["turn_index"] for each in (first, second, third)] == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_edits_of_a_policy_are_spliced(sdk: openai.OpenAI, stream: bool) -> None:
    """The chat route's pipeline, whole: old results shrink, and the text after them is copied."""
    items: Items = [asked(f"Look, with a policy, streamed: {stream}.")]
    options = {"extra_body": {"leyline": {"policy": "truncate_older_than:n=2,max_chars=80"}}}
    for turn in range(5):
        response = ask(sdk, items, stream=stream, store=False, **options)
        items += [*said(response), *looked(turn)]
    found = account(response)
    assert (found["outcome"], found["edits"][0]["role"]) == ("spliced", "tool")
    assert cached(response) == found["tokens"]["prefix"] + found["tokens"]["spliced"]
    assert found["tokens"]["spliced"] > 0


def calls(path: str) -> Items:
    """Calls of the scripted model."""
    listing = {"name": "ls", "arguments": json.dumps({"path": path})}
    patch = {"name": "apply_patch", "arguments": json.dumps({"input": f"*** {path}"})}
    return [
        {"id": f"call_{path}", "type": "function", "function": listing},
        {"id": f"patch_{path}", "type": "function", "function": patch},
    ]


def thinks_and_calls(path: str, *, stream: bool) -> Answer:
    """An answer that thinks, says so, looks into a folder and patches a file."""
    if not stream:
        told = {"role": "assistant", "content": "I look.", "reasoning_content": f"Into {path}."}
        choice = {
            "index": 0,
            "message": {**told, "tool_calls": calls(path)},
            "finish_reason": "tool_calls",
        }
        return chat_json(choices=[choice])
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Into "},
        {"reasoning_content": f"{path}."},
        {"content": "I "},
        {"content": "look."},
    ]
    for index, call in enumerate(calls(path)):
        arguments = call["function"].pop("arguments")
        deltas.append({"tool_calls": [{"index": index, **call}]})
        deltas += [
            {"tool_calls": [{"index": index, "function": {"arguments": letter}}]}
            for letter in arguments
        ]
    events = [*map(chunk, deltas), chunk({}, "tool_calls"), DONE]
    return Answer(events, content_type="text/event-stream")


@pytest.mark.parametrize("resend", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_thinking_and_calls_go_round(stream: bool, resend: bool) -> None:
    """Sent back as the SDK gave them, or stored, they are to the engine what it wrote itself."""
    engine = FakeEngine()
    with scripted(engine) as address, client_of(address) as sdk:
        items: Items = [asked("List.")]
        previous = None
        for path in ("a", "b"):
            engine.answers.append(thinks_and_calls(path, stream=stream))
            response = ask(
                sdk,
                items,
                stream=stream,
                model=MODEL,
                tools=[LS, PATCH],
                reasoning={"effort": "low"},
                previous_response_id=previous,
            )
            thinking, text, listing, patch = response.output
            assert thinking.content[0].text == f"Into {path}."
            assert text.content[0].text == response.output_text == "I look."
            assert (listing.name, json.loads(listing.arguments)) == ("ls", {"path": path})
            assert (patch.type, patch.input) == ("custom_tool_call", f"*** {path}")
            results: Items = [
                {
                    "type": "function_call_output",
                    "call_id": listing.call_id,
                    "output": f"{path}.py",
                },
                {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "Done."},
            ]
            items = [*items, *said(response), *results] if resend else results
            previous = None if resend else response.id
        assert account(response)["turn_index"] == 1
    told = {"role": "assistant", "content": "I look.", "reasoning_content": "Into a."}
    assert engine.sent["messages"][2:] == [
        {**told, "tool_calls": calls("a")},
        {"role": "tool", "tool_call_id": "call_a", "content": "a.py"},
        {"role": "tool", "tool_call_id": "patch_a", "content": "Done."},
    ]
    assert engine.sent["reasoning_effort"] == "low"


async def test_the_asynchronous_client_as_well(origin: str) -> None:
    """Its streams and its answers."""
    async with openai.AsyncOpenAI(base_url=f"{origin}/v1", api_key="none") as sdk:
        request: dict[str, Any] = {"model": RECALL, "max_output_tokens": 4, "input": "Hello."}
        whole = await sdk.responses.create(**request)
        stream = await sdk.responses.create(stream=True, **request)
        *_, last = [event async for event in stream]
    assert last.type in ("response.completed", "response.incomplete")
    assert [item.type for item in last.response.output] == [item.type for item in whole.output]


def test_what_doesnt_fit_is_refused_or_truncated() -> None:
    """By default the engine's own error; with ``truncation: auto`` as many of the oldest items are
    dropped as makes the rest fit, as edits that are declared."""
    options = {"pool_tokens": 3072, "device": "cpu"}
    with embedded_stack(options, log_level="error") as address, client_of(address) as sdk:
        items: Items = [asked("Look around.")]
        for turn in range(6):
            items += looked(turn)
        fits = ask(sdk, items, stream=False, truncation="auto")
        assert fits.truncation == "auto"
        assert account(fits)["edits"] == []
        items += said(fits)
        for turn in range(6, 9):
            items += looked(turn)
        items.append(asked("And now?"))
        with pytest.raises(
            openai.BadRequestError, match="maximum context length is 3072 tokens"
        ) as bad:
            ask(sdk, items, stream=False)
        assert bad.value.code == "context_length_exceeded"
        truncated = ask(sdk, items, stream=False, truncation="auto")
        found = account(truncated)
        assert found["session"] == account(fits)["session"]
        # Its cache is no larger than its window, which leaves no room for a source to copy from.
        assert (found["planned"], found["reason"]) == ("spliced", "source_evicted")
        assert {(edit["cause"], edit["mode"]) for edit in found["edits"]} == {DROPPED}
        assert 3072 - 400 < truncated.usage.input_tokens <= 3072 - 8
        # It continues, from stored responses as well.
        again = ask(
            sdk, "Go on.", stream=True, truncation="auto", previous_response_id=truncated.id
        )
        assert account(again)["session"] == account(fits)["session"]
        assert again.usage.input_tokens <= 3072 - 8


def test_errors_are_the_sdks_own(sdk: openai.OpenAI) -> None:
    """Each mistake raises the class that OpenAI's own answer would, and names the field."""
    nobodys = {"type": "function_call_output", "call_id": 7, "output": "x"}
    with pytest.raises(openai.BadRequestError) as bad:
        ask(sdk, [asked("Hello."), nobodys], stream=False)
    assert bad.value.param == "input[1].call_id"
    with pytest.raises(openai.BadRequestError, match="file_search"):
        tool = {"type": "file_search", "vector_store_ids": ["a"]}
        ask(sdk, "Hello.", stream=False, tools=[tool])
    with pytest.raises(openai.NotFoundError, match=RECALL):
        ask(sdk, "Hello.", stream=False, model="gpt-of-another-house")
    with pytest.raises(openai.BadRequestError, match="background"):
        ask(sdk, "Hello.", stream=False, background=True)
    image = {"type": "input_image", "image_url": "https://images.example/1.png"}
    # The engine's own refusal, of a model that reads text only.
    with pytest.raises(openai.BadRequestError, match=r"input\[0\].*text parts only"):
        request = {"type": "input_text", "text": "What is it?"}
        ask(sdk, [{"role": "user", "content": [image, request]}], stream=False, instructions=None)


def test_keys_and_torn_streams() -> None:
    """A wrong key is an authentication error; a torn stream says that the response failed."""
    engine = FakeEngine()
    torn = [chunk({"role": "assistant", "content": "a"})]
    engine.answers.append(Answer(torn, content_type="text/event-stream", breaks=True))
    with scripted(engine, api_keys=("red:right",)) as address:
        with (
            client_of(address, api_key="wrong") as wrong,
            pytest.raises(openai.AuthenticationError),
        ):
            ask(wrong, "a", stream=False, model=MODEL)
        with client_of(address, api_key="right") as sdk:
            *_, error, last = sdk.responses.create(model=MODEL, input="a", stream=True)
            assert (error.type, last.type) == ("error", "response.failed")
            assert last.response.error is not None
            assert last.response.error.code == "server_error"
            assert ask(sdk, "a", stream=False, model=MODEL).status == "completed"
