"""The hidden turns of a recall, before engines that answer badly or not at all."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import httpx
import pytest
from support.fake_engine import (
    CAPABILITY,
    DONE,
    LONG,
    MODEL,
    Answer,
    FakeEngine,
    chat_json,
    chat_stream,
    chunk,
    proxy_before,
)
from support.sse import sse

from leyline_lab.stand_ins.serving import serving
from leyline_policies.stubs import address_of
from leyline_proxy.http.app import create_app
from leyline_proxy.model.asides import RECALL_TOOL
from leyline_proxy.settings import Settings

POLICY = "truncate_older_than:n=1,max_chars=80,recallable=true"
SETTINGS: dict[str, Any] = {"recall": "on", "policy": POLICY, "log_level": "error"}
HEADERS = {"x-leyline-session": "recalls"}
GOOD = json.dumps({"address": address_of(LONG)})


def called(turn: int) -> dict[str, Any]:
    """An assistant message that calls a tool."""
    function = {"name": "shell", "arguments": "{}"}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": f"call_{turn}", "type": "function", "function": function}],
    }


def history() -> list[dict[str, Any]]:
    """Two tool calls, whose first result is evicted."""
    return [
        {"role": "user", "content": "List the modules, then build them."},
        called(0),
        {"role": "tool", "tool_call_id": "call_0", "content": LONG},
        called(1),
        {"role": "tool", "tool_call_id": "call_1", "content": "built"},
    ]


def recall_call(arguments: str = GOOD, name: str = "r0") -> dict[str, Any]:
    """A call of the recall tool."""
    return {
        "index": 0,
        "id": name,
        "type": "function",
        "function": {"name": RECALL_TOOL, "arguments": arguments},
    }


def asks(text: str = "", call: dict[str, Any] | None = None, finish: str = "tool_calls") -> Answer:
    """A streamed answer that recalls."""
    events = [chunk({"role": "assistant", "content": ""})]
    events += [chunk({"content": text})] if text else []
    events += [chunk({"tool_calls": [call or recall_call()]}), chunk({}, finish), DONE]
    return Answer(events, content_type="text/event-stream")


def asks_whole(call: dict[str, Any], finish: str = "tool_calls") -> Answer:
    """A whole answer that recalls."""
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    return chat_json(choices=[{"index": 0, "message": message, "finish_reason": finish}])


def talk(engine: FakeEngine, *bodies: dict[str, Any], **settings: Any) -> list[Any]:
    """The proxy's answers to requests of one session."""

    async def ask() -> list[Any]:
        async with proxy_before(engine, **{**SETTINGS, **settings}) as client:
            return [
                await client.post(
                    "/v1/chat/completions",
                    json={"model": MODEL, "messages": history(), **body},
                    headers=HEADERS,
                    timeout=20,
                )
                for body in bodies
            ]

    return asyncio.run(ask())


FAILURES = {
    "refuses": Answer([b'{"error": {"message": "too long", "code": 400}}'], status=400),
    "is down": Answer([b"down"], status=503),
    "reports": Answer(
        [b'data: {"error": {"message": "boom", "code": 500}}\n\n'],
        content_type="text/event-stream",
    ),
    "breaks": Answer([chunk({"content": "The"})], content_type="text/event-stream", breaks=True),
    "says nothing": Answer([], content_type="text/event-stream"),
}


@pytest.mark.parametrize("capability", [CAPABILITY, None], ids=["splices", "plain"])
@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_an_engine_that_fails_the_second_turn(failure: Answer, capability: Any) -> None:
    """A stream that has begun ends with an error and without its end marker; the session goes on
    with the recall that it has."""
    engine = FakeEngine(capability=capability)
    engine.answers = [asks("Let me look. "), failure, chat_stream("Done.")]
    broken, after = talk(engine, {"stream": True}, {"stream": True})
    assert broken.status_code == 200
    text = broken.text
    assert "Let me look. " in text and '"error"' in text and "[DONE]" not in text
    assert text.count('\n\ndata: {"error"') == 1 and RECALL_TOOL not in text
    assert "internal" not in text.lower()
    assert "Done." in after.text and after.text.endswith("[DONE]\n\n")
    roles = [each["role"] for each in engine.sent["messages"]]
    assert roles[-2:] == ["assistant", "tool"]
    assert engine.sent["messages"][-1]["content"] == LONG


@pytest.mark.parametrize(
    "arguments", ["", "{", f'{{"address": "{address_of(LONG)}', '["x"]', "null", "7", "{" * 5000]
)
@pytest.mark.parametrize("streams", [False, True])
def test_arguments_that_are_no_object(arguments: str, streams: bool) -> None:
    """Engines refuse a prompt with such arguments, on this turn and all later ones, so they are
    made fit; an address in them counts."""
    engine = FakeEngine()
    call = recall_call(arguments)
    first = asks(call=call, finish="length") if streams else asks_whole(call, "length")
    engine.answers = [first]
    (answer,) = talk(engine, {"stream": streams})
    assert answer.status_code == 200, answer.text
    asked, result = engine.sent["messages"][-2:]
    made = json.loads(asked["tool_calls"][0]["function"]["arguments"])
    has = address_of(LONG) in arguments
    assert made == ({"address": address_of(LONG)} if has else {})
    assert (result["content"] == LONG) == has


def test_calls_without_ids_get_one() -> None:
    """A call and its result name each other, whatever the engine left out."""
    engine = FakeEngine()
    call = recall_call(name="")
    engine.answers = [asks_whole(call)]
    (answer,) = talk(engine, {})
    assert answer.status_code == 200
    asked, result = engine.sent["messages"][-2:]
    assert asked["tool_calls"][0]["id"] == result["tool_call_id"] != ""


@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_that_was_cut_says_so_to_the_client(streams: bool) -> None:
    """A call that isn't answered any more, in an answer without tokens left, ends as cut."""
    engine = FakeEngine()
    answers = [
        asks(call=recall_call(), finish="length")
        if streams
        else asks_whole(recall_call(), "length")
        for _ in range(4)
    ]
    engine.answers = answers
    (answer,) = talk(engine, {"stream": streams}, recall_calls=1)
    assert not engine.answers[1:]
    assert '"length"' in answer.text and '"stop"' not in answer.text


def test_a_request_without_recall_leaves_unchanged() -> None:
    """Bodies of a tenant without recall are forwarded byte for byte, references and all."""
    engine = FakeEngine(capability=None)
    reference = f"leyline://sha256/{address_of(LONG)[7:]}"
    messages = [*history(), {"role": "user", "content": reference}]
    talk(engine, {"messages": messages}, recall="off", policy="keep_all")
    sent = engine.sent
    assert sent["messages"] == messages and "tools" not in sent


@pytest.mark.parametrize("settled", [True, False])
def test_another_engine_takes_over_after_a_recall(settled: bool) -> None:
    """An engine that breaks off right after the model's call costs no hidden turn: the other one's
    first answer is the client's."""
    called = chunk({"role": "assistant", "tool_calls": [recall_call()]})
    parts = [called, chunk({}, "tool_calls")]
    breaking = Answer(parts, content_type="text/event-stream", breaks=True)
    # A turn of a plain server is settled at its stream's end, others with their last token.
    capability = CAPABILITY if settled else None
    engines = {name: FakeEngine(capability=capability) for name in ("one", "two")}
    # Whichever engine is chosen first breaks off.
    order: list[str] = []

    def scripted(name: str, engine: FakeEngine) -> Any:
        async def serve(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http" and scope["path"] == "/v1/chat/completions":
                order.append(name)
                engine.answers = [breaking if len(order) == 1 else chat_stream("Done.")]
            await engine(scope, receive, send)

        return serve

    with ExitStack() as stack:
        origins = {
            name: stack.enter_context(serving(scripted(name, engine)))
            for name, engine in engines.items()
        }
        app = create_app(Settings(upstreams=origins, **SETTINGS))
        origin = stack.enter_context(serving(app))
        body = {"model": MODEL, "messages": history(), "stream": True}
        url = f"{origin}/v1/chat/completions"
        answer = httpx.post(url, json=body, headers=HEADERS, timeout=20)
    assert "Done." in answer.text and answer.text.endswith("[DONE]\n\n"), answer.text
    assert len(order) == 2 and order[0] != order[1]
    roles = [each["role"] for each in engines[order[1]].sent["messages"]]
    assert roles.count("tool") == (3 if settled else 2)


def test_the_time_limit_is_that_of_the_whole_answer() -> None:
    """Hidden turns have no limit of their own."""
    engine = FakeEngine()
    engine.answers = [replace(asks(call=recall_call(name=f"r{n}")), pause_s=0.1) for n in range(6)]
    (answer,) = talk(engine, {"stream": True}, total_timeout_s=0.9)
    assert "longer than 0.9 s" in answer.text
    assert len(engine.bodies) < 5


def test_a_request_names_few_texts_by_references() -> None:
    """Of thousands of references, the latest are looked up; the rest says that it isn't."""
    engine = FakeEngine()
    lines = [f"leyline://sha256/{number:032x}" for number in range(3000)]
    lines[-1] = f"leyline://sha256/{address_of(LONG)[7:]}"
    messages = [
        *history(),
        {"role": "user", "content": "\n".join(lines[:2000])},
        {"role": "user", "content": "\n".join(lines[2000:])},
    ]
    talk(engine, {}, {"messages": messages})
    earlier, later = (str(each["content"]) for each in engine.sent["messages"][-2:])
    assert LONG in later and later.count("no text with this address") == 999
    assert earlier.count("no more texts can be recalled") == 2000 - 24


def test_a_client_that_leaves_in_the_second_turn(caplog: pytest.LogCaptureFixture) -> None:
    """The engine is told, the turn is abandoned, and the session's next turn has the recall."""
    engine = FakeEngine()
    waits = Answer([chunk({"content": "The"})], content_type="text/event-stream", hangs=True)
    engine.answers = [asks("Let me look. "), waits, chat_stream("Done.")]
    body = {"model": MODEL, "messages": history(), "stream": True}
    with serving(create_app(Settings(**SETTINGS), engine_app=engine)) as origin:
        url = f"{origin}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, headers=HEADERS, timeout=20) as answer:
            next(line for line in answer.iter_lines() if '"The"' in line)
        deadline = time.monotonic() + 10
        while not engine.disconnects and time.monotonic() < deadline:
            time.sleep(0.02)
        assert engine.disconnects == 1
        after = httpx.post(url, json=body, headers=HEADERS, timeout=20)
    assert after.text.endswith("[DONE]\n\n")
    assert [each["role"] for each in engine.sent["messages"]][-2:] == ["assistant", "tool"]
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


def test_usage_in_every_chunk_counts_hidden_turns() -> None:
    """With continuous usage, each chunk of the second turn has the first one's tokens, and none of
    the first one's last chunks reaches the client."""
    engine = FakeEngine()
    first = [
        chunk({"role": "assistant", "content": "Let "}, usage=usage(1)),
        chunk({"tool_calls": [recall_call()]}, usage=usage(20)),
        chunk({}, "tool_calls", usage=usage(20)),
        chunk({}, usage=usage(20)).replace(
            b'{"index": 0, "delta": {}, "finish_reason": null}', b""
        ),
        DONE,
    ]
    second = [
        chunk({"role": "assistant", "content": ""}, usage=usage(0)),
        chunk({"content": "Done."}, usage=usage(2)),
        chunk({}, "stop", usage=usage(2)),
        DONE,
    ]
    engine.answers = [Answer(each, content_type="text/event-stream") for each in (first, second)]
    (answer,) = talk(engine, {"stream": True})
    found = [each for each in sse(answer.text) if each != "[DONE]"]
    counts = [each["usage"]["completion_tokens"] for each in found if each.get("usage")]
    assert counts == sorted(counts) and counts[-1] == 22
    ends = [each["choices"][0]["finish_reason"] for each in found if each["choices"]]
    assert [each for each in ends if each] == ["stop"] and ends[-1] == "stop"
    assert len({each["id"] for each in found}) == 1


def usage(written: int) -> dict[str, int]:
    """A turn's usage so far."""
    return {"prompt_tokens": 10, "completion_tokens": written, "total_tokens": 10 + written}


@pytest.mark.parametrize("streams", [False, True])
def test_a_stored_response_continues_its_recall(streams: bool) -> None:
    """A response that the proxy keeps has no trace of the recall, and the next one's prompt has
    it in its place."""
    items: list[dict[str, Any]] = [{"role": "user", "content": "List the modules."}]
    for number, text in enumerate((LONG, "built")):
        call = {"type": "function_call", "call_id": f"call_{number}", "name": "shell"}
        items.append({**call, "arguments": "{}"})
        output = {"type": "function_call_output", "call_id": f"call_{number}", "output": text}
        items.append(output)
    engine = FakeEngine()
    if streams:
        engine.answers = [asks("Let me look. "), chat_stream("Done.")]
    else:
        engine.answers = [asks_whole(recall_call()), chat_json("Done.")]

    async def ask() -> tuple[Any, Any]:
        async with proxy_before(engine, **SETTINGS) as client:

            async def respond(**body: Any) -> Any:
                asked = {"model": MODEL, "stream": streams, **body}
                got = await client.post("/v1/responses", json=asked, headers=HEADERS, timeout=20)
                if not streams:
                    return got.json()
                events = [line[6:] for line in got.text.splitlines() if line.startswith("data: {")]
                return json.loads(events[-1])["response"]

            first = await respond(input=items)
            return first, await respond(input="And now?", previous_response_id=first["id"])

    first, second = asyncio.run(ask())
    assert second["status"] == "completed"
    assert RECALL_TOOL not in json.dumps([first["output"], second["output"], first["tools"]])
    roles = [each["role"] for each in engine.sent["messages"]]
    assert roles[-5:] == ["tool", "assistant", "tool", "assistant", "user"]
    assert engine.sent["messages"][-3]["content"] == LONG
    said = engine.sent["messages"][-4]["content"], engine.sent["messages"][-2]["content"]
    assert said == ("Let me look. " if streams else None, "Done.")
