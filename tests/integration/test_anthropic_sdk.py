"""The Anthropic SDK, unmodified, against the proxy on loopback.

Sessions run on the embedded engine; where the model has to think or to call tools, a scripted
engine answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import pytest
from anthropic import beta_tool
from support.fake_engine import DONE, MODEL, Answer, FakeEngine, chat_json, chunk
from support.stack import embedded_stack

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings

RECALL = "leyline-recall"
SYSTEM = "You are an agent that looks into folders. " * 6
LISTING = "".join(f"{number:04d} drwxr-xr-x build/module_{number}\n" for number in range(20))
LS: dict[str, Any] = {
    "name": "ls",
    "description": "List a folder.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
}
Talk = list[dict[str, Any]]


@pytest.fixture(scope="module")
def origin() -> Iterator[str]:
    """Proxy and embedded engine."""
    options = {"pool_tokens": 32_768, "device": "cpu"}
    with embedded_stack(options, log_level="error") as address:
        yield address


@pytest.fixture(scope="module")
def sdk(origin: str) -> Iterator[anthropic.Anthropic]:
    """A client that knows nothing but the address."""
    with client_of(origin) as client:
        yield client


def client_of(address: str, **options: Any) -> anthropic.Anthropic:
    """The SDK's client, without retries that would hide a failure."""
    given = {"api_key": "none", "max_retries": 0, **options}
    return anthropic.Anthropic(base_url=address, **given)


@contextmanager
def scripted(engine: FakeEngine, **settings: Any) -> Iterator[str]:
    """The origin of a proxy before a scripted engine."""
    app = create_app(Settings(log_level="error", **settings), engine_app=engine)
    with serving(app) as address:
        yield address


def ask(sdk: anthropic.Anthropic, talk: Talk, *, stream: bool, **options: Any) -> Any:
    """One turn, whole or put together by the SDK from its events."""
    request: dict[str, Any] = {
        "model": RECALL,
        "system": SYSTEM,
        "messages": talk,
        "tools": [LS],
        "max_tokens": 8,
        **options,
    }
    if not stream:
        return sdk.messages.create(**request)
    with sdk.messages.stream(**request) as events:
        accounts = [
            event.model_extra["leyline"]
            for event in events
            if event.type == "message_delta" and event.model_extra
        ]
        message = events.get_final_message()
    assert len(accounts) == 1
    return message.model_copy(update={"leyline": accounts[0]})


def account(message: Any) -> dict[str, Any]:
    """The member ``leyline`` of an answer."""
    found: dict[str, Any] = message.leyline
    return found


def looked(talk: Talk, message: Any, turn: int) -> Talk:
    """The conversation after the model's answer, with a call that it might have made, and its
    result; cache markers are where agents put them: at the end."""
    for block in (block for said in talk for block in said["content"]):
        block.pop("cache_control", None)
    use = {"type": "tool_use", "id": f"toolu_{turn}", "name": "ls", "input": {"path": str(turn)}}
    result = {
        "type": "tool_result",
        "tool_use_id": f"toolu_{turn}",
        "content": [{"type": "text", "text": f"{turn}\n{LISTING}"}],
        "cache_control": {"type": "ephemeral"},
    }
    said = [block.model_dump(include={"type", "text"}) for block in message.content]
    return [*talk, {"role": "assistant", "content": [*said, use]}, asked(result)]


def asked(*blocks: dict[str, Any]) -> dict[str, Any]:
    """A message of the user."""
    return {"role": "user", "content": list(blocks)}


def text(words: str) -> dict[str, Any]:
    """A text block."""
    return {"type": "text", "text": words}


@pytest.mark.parametrize("stream", [False, True])
def test_a_session_of_many_turns_is_recognised_and_cached(
    sdk: anthropic.Anthropic, stream: bool
) -> None:
    """Each turn, without any configuration, reads from the cache all that the one before sent, and
    the counts add up to the engine's."""
    talk = [asked(text(f"Look around, streamed: {stream}."))]
    sessions, prompts = set(), [0]
    for turn in range(4):
        counted = sdk.messages.count_tokens(
            model=RECALL,
            system=SYSTEM,
            messages=talk,
            tools=[LS],  # type: ignore[arg-type, list-item]
        )
        message = ask(sdk, talk, stream=stream)
        usage = message.usage
        assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
        assert usage.cache_creation_input_tokens == 0
        assert usage.output_tokens > 0
        if turn:
            assert usage.cache_read_input_tokens >= prompts[-1] - 16
        sessions.add(account(message)["session"])
        assert account(message)["turn_index"] == turn
        prompts.append(counted.input_tokens)
        talk = looked(talk, message, turn)
    assert len(sessions) == 1
    assert prompts == sorted(set(prompts))


@pytest.mark.parametrize("stream", [False, True])
def test_edits_of_a_policy_are_spliced(sdk: anthropic.Anthropic, stream: bool) -> None:
    """The chat route's pipeline, whole: old results shrink, and the text after them is copied."""
    talk = [asked(text(f"Look, with a policy, streamed: {stream}."))]
    options = {"extra_body": {"leyline": {"policy": "truncate_older_than:n=2,max_chars=80"}}}
    for turn in range(5):
        message = ask(sdk, talk, stream=stream, **options)
        talk = looked(talk, message, turn)
    found = account(message)
    assert (found["outcome"], found["edits"][0]["role"]) == ("spliced", "tool")
    tokens = found["tokens"]
    assert message.usage.cache_read_input_tokens == tokens["prefix"] + tokens["spliced"]
    assert tokens["spliced"] > 0


def test_context_management_is_reported_as_anthropic_does(sdk: anthropic.Anthropic) -> None:
    """It is in an answer, in the last delta of a stream, and in a count of tokens."""
    talk = [asked(text("Look, and forget."))]
    for turn in range(3):
        talk = looked(talk, ask(sdk, talk, stream=False), turn)
    edit = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "tool_uses", "value": 1},
        "keep": {"type": "tool_uses", "value": 1},
    }
    request: dict[str, Any] = {
        "model": RECALL,
        "messages": talk,
        "betas": ["context-management-2025-06-27"],
        "context_management": {"edits": [edit]},
    }
    whole = sdk.beta.messages.create(max_tokens=2, **request)
    stream = sdk.beta.messages.create(max_tokens=2, stream=True, **request)
    (delta,) = [event for event in stream if event.type == "message_delta"]
    counted = sdk.beta.messages.count_tokens(**request)
    for answer in (whole, delta):
        assert answer.context_management is not None
        (applied,) = answer.context_management.applied_edits
        assert applied.type == "clear_tool_uses_20250919"
        assert (applied.cleared_tool_uses, applied.cleared_input_tokens > 100) == (2, True)
    assert counted.context_management is not None
    assert counted.context_management.original_input_tokens > counted.input_tokens


def call(path: str) -> dict[str, Any]:
    """A call of the scripted model."""
    function = {"name": "ls", "arguments": json.dumps({"path": path})}
    return {"id": f"call_{path}", "type": "function", "function": function}


def thinks_and_calls(path: str, *, stream: bool) -> Answer:
    """An answer that thinks, says so, and looks into a folder."""
    if not stream:
        said = {"role": "assistant", "content": "I look.", "reasoning_content": f"Into {path}."}
        message = {**said, "tool_calls": [call(path)]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        return chat_json(choices=[choice])
    whole = call(path)
    arguments = whole["function"].pop("arguments")
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Into "},
        {"reasoning_content": f"{path}."},
        {"content": "I "},
        {"content": "look."},
        {"tool_calls": [{"index": 0, **whole}]},
        *({"tool_calls": [{"index": 0, "function": {"arguments": c}}]} for c in arguments),
    ]
    events = [*map(chunk, deltas), chunk({}, "tool_calls"), DONE]
    return Answer(events, content_type="text/event-stream")


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_and_calls_go_round(stream: bool) -> None:
    """Sent back as the SDK gave them, they are to the engine what it wrote itself."""
    engine = FakeEngine()
    with scripted(engine) as address, client_of(address) as sdk:
        talk: list[Any] = [asked(text("List."))]
        for path in ("a", "b"):
            engine.answers.append(thinks_and_calls(path, stream=stream))
            message = ask(sdk, talk, stream=stream, model=MODEL, thinking={"type": "adaptive"})
            thinking, _, use = message.content
            assert (thinking.type, thinking.thinking) == ("thinking", f"Into {path}.")
            assert (use.name, use.input) == ("ls", {"path": path})
            assert message.stop_reason == "tool_use"
            result = {"type": "tool_result", "tool_use_id": use.id, "content": f"{path}.py"}
            talk += [{"role": "assistant", "content": message.content}, asked(result)]
        assert account(message)["turn_index"] == 1
    assert engine.sent["messages"][2:] == [
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Into a.",
            "tool_calls": [{**call("a"), "function": {"name": "ls", "arguments": '{"path":"a"}'}}],
        },
        {"role": "tool", "tool_call_id": "call_a", "content": "a.py"},
    ]
    assert engine.sent["chat_template_kwargs"]["enable_thinking"] is True


def test_the_sdks_own_agent_loop_ends() -> None:
    """Its tool runner calls the tools, sends their results, failed ones too, and stops. It first
    asks the server to hold the conversation, and continues without that on the server's refusal."""
    engine = FakeEngine()
    engine.answers += [thinks_and_calls(path, stream=False) for path in ("a", "gone")]
    engine.answers.append(chat_json("Done."))

    @beta_tool
    def ls(path: str) -> str:
        """List a folder.

        Args:
            path: of the folder.
        """
        if path == "gone":
            raise ValueError("no such folder")
        return f"{path}.py"

    with scripted(engine) as address, client_of(address) as sdk:
        runner = sdk.beta.messages.tool_runner(
            model=MODEL,
            max_tokens=64,
            tools=[ls],
            messages=[{"role": "user", "content": "List all."}],
        )
        last = runner.until_done()
    assert [block.text for block in last.content if block.type == "text"] == ["Done."]
    results = [message for message in engine.sent["messages"] if message["role"] == "tool"]
    assert [result["tool_call_id"] for result in results] == ["call_a", "call_gone"]
    assert results[0]["content"] == "a.py"
    assert results[1]["content"].startswith("Error")
    assert engine.sent["tools"][0]["function"]["parameters"]["required"] == ["path"]


async def test_the_asynchronous_client_as_well(origin: str) -> None:
    """Its streams and its answers."""
    async with anthropic.AsyncAnthropic(base_url=origin, api_key="none") as sdk:
        request: dict[str, Any] = {
            "model": RECALL,
            "max_tokens": 4,
            "messages": [{"role": "user", "content": "Hello."}],
        }
        whole = await sdk.messages.create(**request)
        async with sdk.messages.stream(**request) as events:
            streamed = await events.get_final_message()
    assert [block.type for block in streamed.content] == [block.type for block in whole.content]


def test_errors_are_the_sdks_own(sdk: anthropic.Anthropic) -> None:
    """Each mistake raises the class that Anthropic's own answer would, and names the field."""
    talk = [asked(text("Hello."))]
    nobodys = {"type": "tool_result", "content": "x"}
    with pytest.raises(anthropic.BadRequestError, match="tool_use_id") as bad:
        ask(sdk, [asked(nobodys)], stream=False)
    assert bad.value.request_id is not None
    with pytest.raises(anthropic.BadRequestError, match="web_search_20250305"):
        ask(sdk, talk, stream=True, tools=[{"type": "web_search_20250305", "name": "web_search"}])
    with pytest.raises(anthropic.NotFoundError, match=RECALL):
        ask(sdk, talk, stream=False, model="claude-of-another-house")
    image = {"type": "image", "source": {"type": "url", "url": "https://images.example/1.png"}}
    # The engine's own refusal, of a model that reads text only.
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].*text parts only"):
        ask(sdk, [asked(image, text("What is it?"))], stream=True)


def test_keys_and_torn_streams() -> None:
    """A wrong key is an authentication error; a stream that breaks raises in the middle."""
    engine = FakeEngine()
    torn = [chunk({"role": "assistant", "content": "a"})]
    engine.answers.append(Answer(torn, content_type="text/event-stream", breaks=True))
    with scripted(engine, api_keys=("red:right",)) as address:
        wrong = client_of(address, api_key="wrong")
        with wrong, pytest.raises(anthropic.AuthenticationError):
            ask(wrong, [asked(text("a"))], stream=False, model=MODEL)
        named = {"x-api-key": "right"}
        with client_of(address, api_key=None, default_headers=named) as sdk:
            with pytest.raises(anthropic.APIStatusError, match="The engine"):
                ask(sdk, [asked(text("a"))], stream=True, model=MODEL)
            assert ask(sdk, [asked(text("a"))], stream=False, model=MODEL).stop_reason
