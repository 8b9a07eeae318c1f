"""Conditions on the conversation, from Python and from text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_policies import Context, Message, SpecError
from leyline_policies.triggers import (
    Trigger,
    duration_s,
    fraction,
    idle,
    keyword,
    messages,
    parse_trigger,
    tag,
    tokens,
    tool_uses,
    turns,
)

TALK: list[Message] = [
    {"role": "system", "content": "s" * 400},
    {"role": "user", "content": "Old STOP word"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": each, "function": {"name": "bash"}} for each in "ab"],
    },
    {"role": "tool", "tool_call_id": "a", "content": "x", "tags": ["big", 3]},
    {"role": "tool", "tool_call_id": "b", "content": "stop", "leyline": {"tags": ["odd one"]}},
    {"role": "user", "content": [{"type": "text", "text": "please COMPACT now"}]},
]
FACTS = Context(turn=7, window=1000, idle_s=301, count=lambda message: 100)


def _fires(trigger: Trigger, context: Context = FACTS) -> bool:
    return trigger.fires(TALK, context)


@pytest.mark.parametrize(
    ("holds", "fails"),
    [
        (tokens(599), tokens(600)),
        (messages(5), messages(6)),
        (fraction(0.59), fraction(0.6)),
        (tool_uses(1), tool_uses(2)),
        (idle(300), idle("5.5m")),
        (idle("5m"), idle(301)),
        (turns(6), turns(7)),
        (tag("big"), tag("3")),
        (tag("odd one"), tag("odd")),
        (keyword("compact"), keyword("stop")),
    ],
)
def test_each_condition_holds_above_its_bound(holds: Trigger, fails: Trigger) -> None:
    """Every condition holds on one side of its bound and not at the bound or beyond."""
    assert _fires(holds)
    assert not _fires(fails)
    assert _fires(holds & ~fails)
    assert _fires(fails | holds)
    assert not _fires(holds & fails)
    assert not _fires(~holds | fails)


def test_unknown_window_never_fires() -> None:
    """Without a window, no share of it is exceeded."""
    assert not _fires(fraction(0.0), Context(window=None))


@pytest.mark.parametrize("over", [-0.1, 1.5, 80])
def test_share_of_the_window_is_a_share(over: float) -> None:
    """A percentage in place of a share would never fire, so it is refused."""
    with pytest.raises(ValueError, match="between 0 and 1"):
        fraction(over)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tokens > 100_000", tokens(100_000)),
        ("tokens>5", tokens(5)),
        ("idle > 5m", idle(300)),
        ("idle > 1.5 h", idle(5400)),
        ("fraction > 0.8", fraction(0.8)),
        ("tag:keep", tag("keep")),
        ('keyword: "two words"', keyword("two words")),
        ("not turns > 3", ~turns(3)),
        ("turns > 1 and turns > 2 and turns > 3", turns(1) & turns(2) & turns(3)),
        ("turns > 1 or turns > 2 and turns > 3", turns(1) | turns(2) & turns(3)),
        ("(turns > 1 or turns > 2) and turns > 3", (turns(1) | turns(2)) & turns(3)),
        ("not (turns > 1) and tag:a", ~turns(1) & tag("a")),
        ("( ( turns > 1 ) )", turns(1)),
    ],
)
def test_text_says_the_same_as_python(text: str, expected: Trigger) -> None:
    """The text form of a trigger reads as the one that Python builds."""
    assert parse_trigger(text) == expected


def test_at_least_is_told_from_more_than() -> None:
    """``>=`` holds at the bound, ``>`` doesn't."""
    assert _fires(parse_trigger("tokens >= 600"))
    assert not _fires(parse_trigger("tokens > 600"))


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("", ["a condition such as", "character 0"]),
        ("toks > 5", ["'toks'", "did you mean 'tokens'", "known: tokens"]),
        ("tokens > 5m", ["tokens has no unit"]),
        ("tokens < 5", ["a condition such as"]),
        ("tokens > 100k", ["a condition such as"]),
        ("tokens > 5 tokens > 6", ["'and' or 'or' is missing", "character 11"]),
        ("tokens > 5 and", ["a condition such as", "character 14"]),
        ("(tokens > 5", ["')' is missing"]),
        ("tokens > 5)", ["'and' or 'or' is missing"]),
        ("fraction > 80", ["between 0 and 1"]),
        ("(" * 100, ["nested too deep"]),
        ("not " * 100 + "tag:a", ["nested too deep"]),
        ("tag:", ["a condition such as"]),
    ],
)
def test_mistake_names_the_place(text: str, fragments: list[str]) -> None:
    """Text that is no trigger is a SpecError that says where and what is known."""
    with pytest.raises(SpecError) as caught:
        parse_trigger(text)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_a_chain_of_any_length_is_evaluated() -> None:
    """Thousands of conditions in a row neither nest nor overflow the stack."""
    chain = parse_trigger(" and ".join(["turns > 1"] * 5000))
    assert _fires(chain)
    built = turns(1)
    for _ in range(5000):
        built = built | turns(1)
    assert _fires(built)


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30), (" 30s ", 30), ("5m", 300), ("1.5h", 5400), ("2 d", 172_800)]
)
def test_durations(text: str, seconds: float) -> None:
    """A duration is a number with or without a unit."""
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-5", "5 minutes", "1e3", "5mm"])
def test_no_duration(text: str) -> None:
    """Anything else is refused with an example."""
    with pytest.raises(ValueError, match="no duration such as 30s"):
        duration_s(text)


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    """No text makes the parser fail otherwise than by SpecError."""
    try:
        parse_trigger(text)
    except SpecError:
        return
    assert text.strip()


def test_a_call_that_is_null_is_none() -> None:
    """Clients write out members that they don't use."""
    message: Message = {
        "role": "assistant",
        "content": "x",
        "function_call": None,
        "tool_calls": None,
    }
    assert not tool_uses(0).fires([message], Context())
    assert tool_uses(0).fires([message | {"function_call": {"name": "f"}}], Context())
