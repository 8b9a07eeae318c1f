"""Prompt-cache diagnostics as the SDKs of Anthropic and OpenAI define them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types import (
    CacheMissMessagesChanged,
    CacheMissModelChanged,
    CacheMissPreviousMessageNotFound,
    CacheMissSystemChanged,
    CacheMissToolsChanged,
    CacheMissUnavailable,
    Diagnostics,
)
from support.stack import embedded_stack

from leyline_proxy.apis.anthropic.diagnostics import RequestPrint, RequestPrints, diagnosis

MODEL = "leyline-recall"
TASK = "List what the folders of the project hold, and say what each of them is for. " * 6
LS: dict[str, Any] = {
    "name": "ls",
    "description": "List a folder.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
}
CUT = "redact:pattern='project',replacement='thing'"


@pytest.fixture(scope="module")
def origin() -> Iterator[str]:
    """Proxy and embedded engine."""
    with embedded_stack({"pool_tokens": 16_384, "device": "cpu"}, log_level="error") as address:
        yield address


@pytest.fixture(scope="module")
def sdk(origin: str) -> Iterator[anthropic.Anthropic]:
    """A client that knows nothing but the address."""
    with anthropic.Anthropic(base_url=origin, api_key="none", max_retries=0) as client:
        yield client


def ask(
    sdk: anthropic.Anthropic, session: str, previous: str | None, stream: bool, **changes: Any
) -> anthropic.types.Message:
    """A turn that asks for diagnostics."""
    request: dict[str, Any] = {
        "model": MODEL,
        "system": f"{session}: you look into folders.",
        "messages": talk(session),
        "tools": [LS],
        "max_tokens": 4,
        "diagnostics": {"previous_message_id": previous},
        "extra_headers": {"x-leyline-session": session},
    }
    request |= changes
    if not stream:
        return sdk.messages.create(**request)
    with sdk.messages.stream(**request) as events:
        return events.get_final_message()


def talk(session: str, *more: str, task: str = TASK) -> list[dict[str, Any]]:
    """A conversation with further texts of the user and the assistant in turn."""
    messages = [{"role": "user", "content": f"{session}. {task}"}]
    for number, text in enumerate(more):
        role = "user" if number % 2 else "assistant"
        messages.append({"role": role, "content": text})
    return messages


GROWN = ("They hold sources.", "And the others?")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("system", CacheMissSystemChanged),
        ("tools", CacheMissToolsChanged),
        ("messages", CacheMissMessagesChanged),
        ("policy", CacheMissUnavailable),
        ("thinking", CacheMissUnavailable),
    ],
)
def test_the_first_difference_is_the_reason(
    sdk: anthropic.Anthropic, name: str, kind: type, stream: bool
) -> None:
    """The SDK parses each reason under its own type, with the tokens that the difference cost; what
    a policy did has no word of its own there."""
    session = f"{name}-{stream}"
    first = ask(sdk, session, None, stream)
    assert first.diagnostics is None
    grown = talk(session, *GROWN)
    changes: dict[str, dict[str, Any]] = {
        "system": {"system": "You look elsewhere."},
        "tools": {"tools": [LS, {**LS, "name": "cat"}]},
        "messages": {"messages": talk(session, *GROWN, task=TASK.replace("say", "tell"))},
        "policy": {"extra_body": {"leyline": {"policy": CUT}}},
        "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    }
    second = ask(sdk, session, first.id, stream, **{"messages": grown, **changes[name]})
    assert isinstance(second.diagnostics, Diagnostics)
    reason = second.diagnostics.cache_miss_reason
    assert isinstance(reason, kind)
    account = second.model_extra or {}
    missed = getattr(reason, "cache_missed_input_tokens", None)
    if kind is CacheMissUnavailable:
        assert missed is None
    else:
        assert missed > 50
        if not stream:
            assert missed == account["leyline"]["busts"]["lost_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_that_grows_has_no_reason(sdk: anthropic.Anthropic, stream: bool) -> None:
    """Turn after turn the diagnostics are null, whatever cache markers move."""
    session, previous = f"grows-{stream}", None
    more: tuple[str, ...] = ()
    for number in range(3):
        messages = talk(session, *more)
        marked: dict[str, Any] = {"type": "text", "text": messages[-1]["content"]}
        marked["cache_control"] = {"type": "ephemeral"}
        messages[-1] = {**messages[-1], "content": [marked]}
        message = ask(sdk, session, previous, stream, messages=messages)
        assert message.diagnostics is None, number
        previous, more = message.id, (*more, "They hold more.", f"And number {number}?")


def test_an_unknown_message_is_said_to_be_unknown(sdk: anthropic.Anthropic, origin: str) -> None:
    """An id that this proxy didn't give, or gave without being asked for diagnostics, is not
    found; a request that doesn't ask gets none."""
    plain = ask(sdk, "unknown", None, False, diagnostics=anthropic.omit)
    assert "diagnostics" not in plain.model_fields_set
    for previous in ("msg_elsewhere", plain.id):
        message = ask(sdk, "unknown", previous, False)
        assert message.diagnostics is not None
        reason = message.diagnostics.cache_miss_reason
        assert isinstance(reason, CacheMissPreviousMessageNotFound)
    for wrong, field in (
        ("yes", "diagnostics"),
        ({"previous_message_id": 7}, "diagnostics.previous_message_id"),
    ):
        body = {"model": MODEL, "max_tokens": 1, "messages": talk("x"), "diagnostics": wrong}
        refused = httpx.post(f"{origin}/v1/messages", json=body)
        assert refused.status_code == 400
        assert refused.json()["leyline"]["param"] == field


def test_another_model_comes_before_all_else() -> None:
    """Of several differences the model's is named, as the prompt can't be shared at all."""
    before = RequestPrint("a", 1, 2, 3, 2, 20)
    now = RequestPrint("b", 9, 9, 9, 3, 30)
    found = diagnosis(before, now, (10, 21, 30), 77)
    assert found == {
        "cache_miss_reason": {"type": "model_changed", "cache_missed_input_tokens": 77}
    }
    assert CacheMissModelChanged.model_validate(found["cache_miss_reason"])


def test_requests_are_remembered_by_tenant_and_bounded() -> None:
    """Another tenant's request isn't found, and the oldest is forgotten."""
    prints = RequestPrints(most=2)
    made = [RequestPrint("m", 0, 0, 0, 0, number) for number in range(3)]
    for number, each in enumerate(made):
        prints.put("red", f"msg_{number}", each)
    assert prints.get("red", "msg_0") is None
    assert prints.get("red", "msg_2") == made[2]
    assert prints.get("blue", "msg_2") is None


def test_openai_counts_parse(origin: str) -> None:
    """The counts that OpenAI defines are those of the receipt, in both of its APIs."""
    with openai.OpenAI(base_url=f"{origin}/v1", api_key="none", max_retries=0) as client:
        options: dict[str, Any] = {"prompt_cache_key": "k", "prompt_cache_retention": "24h"}
        for turn in range(2):
            messages: Any = talk("openai", *GROWN[: 2 * turn])
            chat = client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=2, **options
            )
            made = client.responses.create(
                model=MODEL, input=messages, max_output_tokens=16, **options
            )
        for usage, answer in ((chat.usage, chat), (made.usage, made)):
            tokens = (answer.model_extra or {})["leyline"]["tokens"]
            details = getattr(usage, "prompt_tokens_details", None) or usage.input_tokens_details
            assert details.cached_tokens == sum(tokens[n] for n in ("prefix", "spliced", "reused"))
        assert made.prompt_cache_key == "k"
