"""The verdict ``quarantine`` as a verb: what is left of a message, and what it outranks."""

from __future__ import annotations

from typing import Any

import pytest

from leyline_policies import Context, Message
from leyline_policies.marks import mark_of
from leyline_policies.promises import forgets
from leyline_policies.verbs import (
    Verbs,
    forget,
    is_forgotten,
    pin,
    quarantine,
    quarantined,
    quarantined_for,
)

STUB = "[quarantined: verdict]"
FUNCTION = {"name": "f", "arguments": '{"path": "poison"}'}
CALL = {"id": "c", "type": "function", "function": FUNCTION}


def run(*messages: Message) -> list[Message]:
    """The messages after the verbs."""
    return Verbs().transform(list(messages), 0, Context(slot="verbs"))


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "tool_call_id": "c", "content": "poison"},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "poison"}]},
        {"role": "user", "content": "poison"},
        {"role": "assistant", "content": "poison", "reasoning_content": "poison"},
        {"role": "assistant", "content": "poison", "tool_calls": [CALL]},
        {"role": "assistant", "content": None, "function_call": FUNCTION},
        {"role": "tool", "tool_call_id": "c", "content": "x", "metadata": {"note": "poison"}},
    ],
)
def test_a_stub_takes_the_place_of_any_message(message: Message) -> None:
    """It keeps the role and the pairing with calls, also of the user's last message, no text."""
    (after,) = run(quarantine(message))
    assert (after["role"], after["content"]) == (message["role"], STUB)
    assert after.get("tool_call_id") == message.get("tool_call_id")
    assert [call["id"] for call in after.get("tool_calls", ())] == [
        call["id"] for call in message.get("tool_calls", ())
    ]
    assert "poison" not in repr(dict(after))
    mark = mark_of(after)
    assert mark is not None
    assert (mark.mode, mark.cause) == ("forget", "verdict")


@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_stay(role: str) -> None:
    """A verdict on them is no demand."""
    message = quarantine({"role": role, "content": "Be terse."})
    assert not is_forgotten(message)
    assert run(message)[0]["content"] == "Be terse."


def test_a_verdict_outranks_other_wishes() -> None:
    """A message that is pinned, or to be forgotten or evicted, leaves the stub as well."""
    note: Message = {"role": "user", "content": "poison"}
    for wish in (pin(note), forget(note), {**note, "leyline": {"evict": True, "scratch": True}}):
        assert dict(run(quarantine(wish))[0]) == {"role": "user", "content": STUB}


def test_a_policy_that_uses_it_forgets() -> None:
    """Its edit counts as a forget, so the policy has to declare that."""
    message: Message = {"role": "tool", "tool_call_id": "c", "content": "x"}
    assert forgets(quarantine(message), {id(message)})


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (STUB, "verdict"),
        ("[quarantined: A b]", None),
        (f"{STUB} ", None),
        ([STUB], None),
        (0, None),
    ],
)
def test_a_stub_is_known_by_its_text(content: Any, why: str | None) -> None:
    """It names its word, and is the same object if it is put into quarantine again."""
    message: Message = {"role": "user", "content": content}
    assert quarantined_for(message) == why
    assert (quarantined(message, "verdict") is message) is (why is not None)
