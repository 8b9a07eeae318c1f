"""pin_system, case by case."""

from __future__ import annotations

import json

import pytest
from tool_talks import USER, asks, call, result

from leyline_policies import Context, Message, SpecError, load_pipeline
from leyline_policies.builtin.pin_system import PinSystem
from leyline_policies.context import apply

RULES = "Be brief. Version 2.0 of 2024-01-01."


def _talk(clock: str, *more: Message) -> list[Message]:
    return [{"role": "system", "content": f"{RULES}\n{clock}"}, USER, *more]


def _turns(
    clocks: list[str], *, now: str = "end", context: Context | None = None
) -> list[list[Message]]:
    """The messages sent on each turn."""
    (policy,) = load_pipeline(f"pin_system:now={now}")
    context = context or Context()
    sent = []
    for turn, clock in enumerate(clocks):
        # Between turns the state travels as JSON.
        context.state.update(json.loads(json.dumps(context.state)))
        sent.append(apply(policy, _talk(clock), turn, context))
    return sent


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (
            "The current time is 2024-05-15 15:00:00 EST.",
            "The current time is 2024-05-16 09:10:11 EST.",
        ),
        ("  Today's date: Sat Nov 21 2026", "  Today's date: Sun Nov 22 2026"),
        ("- Current date: 2026-11-21", "- Current date: 2026-12-01"),
        ("time: 3:04 PM", "time: 11:05 AM"),
        ("now = 1732212345.25", "now = 1732212399.5"),
        ("Date: 21 November 2026", "Date: 3 December 2026"),
        ("DATE 11/21/2026", "DATE 1/2/2027"),
        ("timestamp 2026-11-21T10:11:12.345Z", "timestamp 2026-11-21T10:11:13.001+01:00"),
    ],
)
def test_the_clock_stands_still(first: str, later: str) -> None:
    """The instructions stay as on the first turn, whatever way the time is written."""
    one, two, three = _turns([first, later, first])
    assert one == _talk(first) == three
    assert two[0] == one[0]
    told = f"{USER['content']}\n\n[From the instructions, as of now]\n{later.strip()}"
    assert two[1] == {"role": "user", "content": told}


def test_the_time_may_be_left_out() -> None:
    """With ``now=omit`` later turns say nothing of it."""
    one, two = _turns(["Time: 10:00", "Time: 10:01"], now="omit")
    assert one == two


def test_the_newest_result_bears_the_time() -> None:
    """It goes where the least follows it, and never into the model's text."""
    context, policy = Context(), PinSystem()
    apply(policy, _talk("Time: 10:00"), 0, context)
    steps = [asks(call("c")), result("c", "out"), {"role": "assistant", "content": "begun"}]
    after = apply(policy, _talk("Time: 10:01", *steps), 1, context)
    assert after[3]["content"] == "out\n\n[From the instructions, as of now]\nTime: 10:01"
    assert after[4] is steps[2]


def test_changed_instructions_are_sent_as_they_are() -> None:
    """Text other than a time on a line of the clock is the client's: it reaches the model at
    once."""
    context = Context()
    _turns(["Time: 10:00"], context=context)
    changed = _talk("Time: 10:00")
    changed[0] = {"role": "system", "content": "Be long. Version 3.0 of 2025-02-02.\nTime: 10:09"}
    after = apply(PinSystem(), changed, 1, context)
    assert after[0]["content"] == "Be long. Version 3.0 of 2025-02-02.\nTime: 10:00"


def test_another_number_of_times_is_pinned_anew() -> None:
    """New instructions with a clock of another kind begin a new pin."""
    sent = _turns(["Time: 10:00", "Time: 2026-11-21 10:01, Sat", "Time: 2026-11-21 10:02, Sat"])
    assert sent[1] == _talk("Time: 2026-11-21 10:01, Sat")
    assert sent[2][0] == sent[1][0]


def test_messages_behind_the_front_are_history() -> None:
    """A reminder in mid-conversation keeps its time, for it is said once."""
    context = Context()
    for turn, minute in enumerate(("10:00", "10:01")):
        messages = [USER, {"role": "system", "content": f"Time: {minute}"}]
        assert apply(PinSystem(), messages, turn, context) == messages
    assert context.state == {}


def test_the_state_holds_times_only() -> None:
    """No other word of the instructions is kept in the session."""
    context = Context()
    _turns(["Today is Saturday, 2026-11-21, in secret mode"], context=context)
    assert context.state == {"pinned": ["Saturday", "2026-11-21"]}


def test_parts_are_read_and_kept() -> None:
    """Instructions in text parts keep their form."""
    context = Context()

    def parts(minute: str) -> list[Message]:
        marked = {"type": "text", "text": f"Time: {minute}", "cache_control": {"type": "x"}}
        return [{"role": "developer", "content": [{"type": "text", "text": RULES}, marked]}, USER]

    apply(PinSystem(), parts("10:00"), 0, context)
    assert apply(PinSystem(), parts("10:01"), 1, context)[0] == parts("10:00")[0]


def test_an_unknown_place_is_refused() -> None:
    """The message says what it may be."""
    with pytest.raises(SpecError, match="now="):
        load_pipeline("pin_system:now=front")
