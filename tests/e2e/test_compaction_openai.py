"""Compaction by OpenAI's Responses API: the SDK, unmodified, and a real engine."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from compaction_kit import (
    ANSWER,
    LISTING,
    SUMMARY,
    asks_for_summary,
    compacting_stack,
    prompts,
)
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from leyline_lab.stand_ins.scripted_model import (
    SCRIPTED,
    Prompt,
    Reply,
    Script,
    ScriptedModel,
    build_scripted,
    scripted_model,
)
from leyline_lab.stand_ins.serving import serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings

TENANTS = {name: {"api_keys": [f"key-of-{name}"]} for name in ("red", "blue")}
RULES = "You are an agent that looks into folders."
MANAGED: Any = [{"type": "compaction", "compact_threshold": 500}]
Stack = tuple[str, ScriptedModel]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's files."""
    return Path(build_scripted(tmp_path_factory.mktemp("model") / "scripted"))


@pytest.fixture(scope="module")
def stack(files: Path) -> Iterator[Stack]:
    """A proxy's origin, and the model behind it."""
    with compacting_stack(files, tenants=TENANTS) as (origin, model):
        yield origin, model


@pytest.fixture
def sdk(stack: Stack) -> Iterator[openai.OpenAI]:
    """A client of one tenant."""
    with client_of(stack[0]) as client:
        yield client


def client_of(origin: str, tenant: str = "red") -> openai.OpenAI:
    """The SDK's client, without retries that would hide a failure."""
    return openai.OpenAI(base_url=f"{origin}/v1", api_key=f"key-of-{tenant}", max_retries=0)


def items(task: str, calls: int = 3) -> list[Any]:
    """A conversation with so many tool calls."""
    found: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": task},
    ]
    for number in range(calls):
        call = {"type": "function_call", "call_id": f"c{number}", "name": "ls"}
        result = {"type": "function_call_output", "call_id": f"c{number}"}
        found += [{**call, "arguments": "{}"}, {**result, "output": f"{number}\n{LISTING}"}]
    return found


def ask(sdk: openai.OpenAI, given: Any, *, stream: bool = False, **options: Any) -> Any:
    """One response, whole or put together by the SDK from its events."""
    request: dict[str, Any] = {"model": SCRIPTED, "instructions": RULES, "input": given, **options}
    if not stream:
        return sdk.responses.create(**request)
    with sdk.responses.stream(**request) as events:
        found = list(events)
    assert [event.sequence_number for event in found] == list(range(len(found)))
    kinds = [event.type for event in found]
    assert kinds[2:4] == ["response.output_item.added", "response.output_item.done"]
    return found[-1].response


def sent_back(response: Any) -> list[Any]:
    """The items of an answer, as clients send them back."""
    # The SDK's types know no message of the user in an answer, and warn.
    return [item.model_dump(exclude_none=True, warnings=False) for item in response.output]


@pytest.mark.parametrize("stream", [False, True])
def test_a_managed_response_begins_with_a_compaction(
    sdk: openai.OpenAI, stack: Stack, stream: bool
) -> None:
    """The item stands in place of what came before it, whether the client still sends that or not:
    the next turn's prompt begins as this one's."""
    model, before = stack[1], len(stack[1].admitted)
    first = items(f"Find it, {stream}.")
    response = ask(sdk, first, stream=stream, context_management=MANAGED)
    compaction, message = response.output
    assert (compaction.type, message.content[0].text) == ("compaction", ANSWER)
    assert SUMMARY not in compaction.encrypted_content
    assert compaction.id != message.id
    told = response.leyline["compaction"]
    assert told["compacted"] and "messages" not in told
    assert response.usage.input_tokens < 500 < told["usage"]["prompt_tokens"]
    asked, compacted = prompts(model)[before:]
    assert len(asked.messages) > 6
    assert compacted.messages[0] == ("system", f"{RULES}\n\nBe brief.")
    assert compacted.messages[1] == ("user", f"Find it, {stream}.")
    assert compacted.messages[2][1].endswith(SUMMARY)
    later: list[Any] = [*sent_back(response), {"role": "user", "content": "Go on."}]
    for given in ([*first, *later], [first[0], *later]):
        answer = ask(sdk, given, context_management=MANAGED)
        assert [item.type for item in answer.output] == ["message"]
        assert prompts(model)[-1].messages[:3] == compacted.messages
        assert prompts(model)[-1].messages[3:] == (("assistant", ANSWER), ("user", "Go on."))
        assert answer.leyline["session"] == response.leyline["session"]


def test_a_stored_response_continues_from_its_compaction(sdk: openai.OpenAI, stack: Stack) -> None:
    """``previous_response_id`` alone brings the compacted conversation back."""
    response = ask(sdk, items("Store it."), context_management=MANAGED)
    later = ask(sdk, "Go on.", previous_response_id=response.id)
    assert [role for role, _ in prompts(stack[1])[-1].messages] == [
        "system",
        "user",
        "user",
        "assistant",
        "user",
    ]
    assert later.leyline["session"] == response.leyline["session"]


def test_the_compact_route_returns_the_next_window(sdk: openai.OpenAI, stack: Stack) -> None:
    """The user's messages and one compaction; sent back as they are, they continue."""
    before = len(stack[1].admitted)
    compacted = sdk.responses.compact(model=SCRIPTED, instructions=RULES, input=items("Compact."))
    assert compacted.object == "response.compaction"
    assert [item.type for item in compacted.output] == ["message", "compaction"]
    assert len(stack[1].admitted) == before + 1
    assert compacted.usage.input_tokens > 500
    assert compacted.usage.output_tokens > 0
    answer = ask(sdk, [*sent_back(compacted), {"role": "user", "content": "Go on."}])
    assert answer.output_text == ANSWER
    window = prompts(stack[1])[-1].messages
    assert window[1] == ("user", "Compact.")
    assert window[2][1].endswith(SUMMARY)
    assert [role for role, _ in window] == ["system", "user", "user", "user"]
    assert answer.leyline["session"] == compacted.model_extra["leyline"]["session"]  # type: ignore[index]


def test_a_trigger_compacts_and_ends(sdk: openai.OpenAI, stack: Stack) -> None:
    """The item asks for a compaction of any size, and the answer is nothing else; it can be
    continued by its id."""
    given = [*items("Trigger.", calls=1), {"type": "compaction_trigger"}]
    for stream in (False, True):
        response = ask(sdk, given, stream=stream)
        assert [item.type for item in response.output] == ["compaction"]
    answer = ask(sdk, "Go on.", previous_response_id=response.id)
    assert answer.output_text == ANSWER
    assert prompts(stack[1])[-1].messages[2][1].endswith(SUMMARY)
    with pytest.raises(openai.BadRequestError) as raised:
        ask(sdk, [{"type": "compaction_trigger"}, *given])
    assert raised.value.param == "input[0]"


@pytest.mark.parametrize("how", ["tenant", "model", "tampered", "cut", "empty"])
def test_an_item_opens_for_its_tenant_and_model_alone(
    sdk: openai.OpenAI, stack: Stack, how: str
) -> None:
    """Any other is refused by name, in the API's own shape, and nothing runs."""
    compacted = sdk.responses.compact(model=SCRIPTED, input=items("Mine."))
    item: dict[str, Any] = sent_back(compacted)[-1]
    carried = item["encrypted_content"]
    middle = len(carried) // 2
    other = "A" if carried[middle] != "A" else "B"
    wrong = {
        "tampered": carried[:middle] + other + carried[middle + 1 :],
        "cut": carried[:-8],
        "empty": "",
    }
    item["encrypted_content"] = wrong.get(how, carried)
    before = len(stack[1].admitted)
    with (
        client_of(stack[0], "blue" if how == "tenant" else "red") as client,
        pytest.raises(openai.BadRequestError) as raised,
    ):
        client.responses.create(
            model="other" if how == "model" else SCRIPTED,
            input=[item, {"role": "user", "content": "Go on."}],  # type: ignore[list-item,misc]
        )
    assert raised.value.param == "input[0].encrypted_content"
    assert raised.value.code == "invalid_encrypted_content"
    assert len(stack[1].admitted) == before


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ([{"type": "compaction", "compact_threshold": 0}], "[0].compact_threshold"),
        ([{"type": "compaction", "compact_threshold": -1}], "[0].compact_threshold"),
        ([{"type": "compaction", "compact_threshold": "500"}], "[0].compact_threshold"),
        ([{"type": "compaction", "compact_threshold": True}], "[0].compact_threshold"),
        ([{"type": "clear_tool_uses_20250919"}], "[0].type"),
        ([{"type": "compaction", "more": 1}], "[0]"),
        (["compaction"], "[0].type"),
        ([*MANAGED, *MANAGED], "[1]"),
    ],
)
def test_mistakes_name_the_entry(sdk: openai.OpenAI, given: Any, field: str) -> None:
    """A 400 with the field."""
    with pytest.raises(openai.BadRequestError) as raised:
        ask(sdk, "Hello.", context_management=given)
    assert raised.value.param == f"context_management{field}"


def test_proxies_that_share_a_secret_share_compactions(files: Path) -> None:
    """An item of one proxy opens in another with the same ``session_secret``, rotated or not; not
    in one with another secret, nor in one without."""
    with (
        compacting_stack(files, tenants=TENANTS, session_secret="a" * 32) as (origin, _),
        client_of(origin) as first,
    ):
        kept = sent_back(first.responses.compact(model=SCRIPTED, input=items("Share.")))
    for secret, opens in ((f"{'b' * 32},{'a' * 32}", True), ("b" * 32, False), ("", False)):
        with (
            compacting_stack(files, tenants=TENANTS, session_secret=secret) as (origin, model),
            client_of(origin) as other,
        ):
            given: Any = [*kept, {"role": "user", "content": "Go on."}]
            if opens:
                assert ask(other, given).output_text == ANSWER
                assert prompts(model)[-1].messages[2][1].endswith(SUMMARY)
                continue
            with pytest.raises(openai.BadRequestError, match="encrypted_content"):
                ask(other, given)


def slowly(text: str, seconds: float) -> Script:
    """A model that takes its time for a summary."""

    def write(prompt: Prompt) -> tuple[Reply, bool]:
        asked = asks_for_summary(prompt)
        time.sleep(seconds if asked else 0)
        return Reply(text if asked else ANSWER), asked

    return write


def streamed(origin: str, **options: Any) -> tuple[int, list[str], list[dict[str, Any]]]:
    """A stream's status, its comments before the first item, and its events."""
    request = {"model": SCRIPTED, "stream": True, **options}
    headers = {"authorization": "Bearer key-of-red"}
    answer = httpx.post(f"{origin}/v1/responses", json=request, headers=headers, timeout=60)
    ahead = answer.text.partition("response.output_item")[0].splitlines()
    found = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:6] == "data: "]
    assert [each.get("sequence_number") for each in found] == list(range(len(found)))
    return answer.status_code, [line for line in ahead if line.startswith(":")], found


BEGUN = ["response.created", "response.in_progress"]
TRIGGER = {"type": "compaction_trigger"}


@pytest.mark.parametrize("how", ["managed", "trigger"])
def test_a_stream_lives_while_a_summary_is_written(files: Path, how: str) -> None:
    """It begins soon, comments follow, and then all is as if the summary had been there; the SDK
    reads it, and it can be continued by its id."""
    given = [*items("Slow."), *([TRIGGER] if how == "trigger" else [])]
    options: dict[str, Any] = {"context_management": MANAGED} if how == "managed" else {}
    with (
        compacting_stack(
            files, slowly(SUMMARY, 0.7), tenants=TENANTS, stream_ping_interval_s=0.15
        ) as (origin, model),
        client_of(origin) as sdk,
    ):
        status, comments, events = streamed(origin, input=given, **options)
        assert (status, len(comments) >= 2) == (200, True)
        kinds = [each["type"] for each in events]
        assert kinds[:2] == BEGUN and kinds.count(BEGUN[0]) == 1
        assert kinds[2:4] == ["response.output_item.added", "response.output_item.done"]
        stream = sdk.responses.create(
            model=SCRIPTED, instructions=RULES, input=given, stream=True, **options
        )
        first = next(iter(stream))
        assert first.type == "response.created"
        response = [*stream][-1].response  # type: ignore[union-attr]
        assert response.id == first.response.id
        assert next(each.type for each in response.output) == "compaction"
        assert ask(sdk, "Go on.", previous_response_id=response.id).output_text == ANSWER
        assert prompts(model)[-1].messages[2][1].endswith(SUMMARY)


@pytest.mark.nightly
def test_a_summary_that_fails_late_ends_its_stream(files: Path) -> None:
    """A request for a compaction alone gets the API's own events of a failure, another its answer;
    what fails before the stream has begun is an error with a status."""
    managed = {"input": items("Fails."), "context_management": MANAGED}
    trigger = {"input": [*items("Fails."), TRIGGER]}
    with compacting_stack(files, slowly("", 0.4), tenants=TENANTS) as (origin, _):
        with client_of(origin) as sdk, pytest.raises(openai.InternalServerError) as raised:
            sdk.responses.create(model=SCRIPTED, stream=True, **trigger)
        assert (raised.value.status_code, raised.value.code) == (502, "no_summary")
    with compacting_stack(files, slowly("", 0.4), tenants=TENANTS, stream_ping_interval_s=0.1) as (
        origin,
        _,
    ):
        status, _, events = streamed(origin, **trigger)
        kinds = [each["type"] for each in events]
        assert (status, kinds) == (200, [*BEGUN, "error", "response.failed"])
        assert events[2]["code"] == "no_summary"
        status, _, events = streamed(origin, **managed)
        assert (status, [each["type"] for each in events][:2]) == (200, BEGUN)
        assert [each["type"] for each in events[-1]["response"]["output"]] == ["message"]
        assert events[-1]["response"]["leyline"]["compaction"]["reason"] == "no_summary"


class Tiring:
    """An engine that answers one chat request, and ends the streams of others before they begin."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.answered = 0
        self.refused = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] == "http" and scope["path"].endswith("/chat/completions"):
            if self.answered:
                self.refused += 1
                await Response(media_type="text/event-stream")(scope, receive, send)
                return
            self.answered += 1
        await self._app(scope, receive, send)


@pytest.mark.nightly
def test_another_engine_answers_after_the_stream_has_begun(files: Path) -> None:
    """The client has seen nothing of an answer yet, so its turn may go elsewhere."""
    with ExitStack() as stack:
        enter = stack.enter_context
        models = [enter(scripted_model(files, slowly(SUMMARY, 0.4))) for _ in "ab"]
        engines = [Tiring(model.app) for model in models]
        upstreams = {f"e{at}": enter(serving(each)) for at, each in enumerate(engines)}
        given = {"upstreams": upstreams, "tenants": TENANTS, "stream_ping_interval_s": 0.1}
        app = create_app(Settings(log_level="error", **given))
        origin = enter(serving(app))
        options = {"input": items("Elsewhere."), "context_management": MANAGED}
        status, _, events = streamed(origin, **options)
        assert sorted((each.answered, each.refused) for each in engines) == [(1, 0), (1, 1)]
        assert (status, [each["type"] for each in events][:2]) == (200, BEGUN)
        output = events[-1]["response"]["output"]
        assert [each["type"] for each in output] == ["compaction", "message"]
