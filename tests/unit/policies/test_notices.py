"""Notices tell the model what was removed."""

from __future__ import annotations

from typing import Any

import pytest
from talking import Talk
from tool_talks import SYSTEM, USER, asks, call, result, steps

from leyline_policies import Message, Policy, SpecError, drop, load_pipeline
from leyline_policies.compose import pipeline
from leyline_policies.marks import mark_of
from leyline_policies.notices import notice, notices
from leyline_policies.recall import evicted_by
from leyline_policies.testing import check_policy

WINDOW = "sliding_window:max_messages=8,keep_messages=4,notices=true"


def size(message: Message) -> int:
    """One token for each character."""
    return len(str(message["content"]))


def talk(number: int) -> list[Message]:
    """So many steps with long results."""
    return [SYSTEM, USER, *steps(*(("bash", f"{i} " * 200) for i in range(number)))]


def test_a_notice_is_where_messages_are_gone() -> None:
    """It counts them, stays the same while the gap does, and changes when it grows."""
    session = Talk(WINDOW)
    noted = session.send(talk(5), count=size)
    gone = talk(5)[2:6]
    tokens = sum(map(size, gone))
    assert noted[1]["content"] == f"Fix it.\n\n{notice(4, tokens, 'sliding_window')}"
    assert noted[2:] == talk(5)[6:]
    assert notice(4, tokens, "sliding_window") == (
        f"[Here, 4 messages (~{tokens} tokens) of the history were dropped by sliding_window. They "
        "are no longer in your context; verify critical facts again at their sources.]"
    )
    later = session.send(talk(6)[:-1], count=size)
    assert later[: len(noted)] == noted
    assert later[1] is noted[1]
    moved = session.send(talk(7), count=size)
    assert "[Here, 8 messages" in moved[1]["content"]


def test_it_costs_no_more_edits_than_the_removal() -> None:
    """On made-up sessions, a notice never changes text that the policy would have kept."""
    for spec in ("sliding_window:max_messages=10", "drop_failed_calls"):
        (plain,), (noted,) = (
            load_pipeline(spec),
            load_pipeline(f"{spec}{',' if ':' in spec else ':'}notices=true"),
        )
        bare, told = check_policy(plain), check_policy(noted)
        assert told.sent_tokens > bare.sent_tokens
        assert told.rewrites <= bare.rewrites


def test_a_summary_is_named_as_one() -> None:
    """The notice stands with it, once, for all that it covers."""
    session = Talk("summarize:trigger_tokens=60,keep_messages=2,notices=true")
    facts: dict[str, Any] = {"count": lambda message: 60 + len(str(message["content"])) // 4}
    session.send(talk(5), **facts)
    session.answer("they looked")
    sent = session.send(talk(5), **facts)
    text = str(sent[1]["content"])
    assert "they looked" in text
    assert text.endswith("verify critical facts again at their sources.]")
    assert "[Here, 8 messages (" in text and "were summarized by summarize. The summary is" in text
    assert str(sent).count("[Here, ") == 1
    mark = mark_of(sent[1])
    assert mark is not None and mark.cause == "summary"


def test_a_small_gap_has_none() -> None:
    """A notice that is longer than what is gone would be a loss."""
    messages = [SYSTEM, USER, *steps(("bash", "Error: no"), ("bash", "fine"))]
    sent = Talk("drop_failed_calls:notices=true").send(messages, count=size)
    assert sent == [SYSTEM, USER, *messages[4:]]


def test_each_gap_has_its_own() -> None:
    """It is in the message before it that the model answers, and in a part list as a part."""
    parts = [{"type": "text", "text": "look"}]
    messages = [
        SYSTEM,
        {"role": "user", "content": parts},
        *steps(("a", "x" * 900)),
        *steps(("b", "stays"), start=1),
        *steps(("c", "y" * 900), start=2),
        {"role": "user", "content": "now?"},
    ]

    class Drops:
        name, mode, trusted = "drops", "amortize", True

        def transform(self, messages: list[Message], turn_idx: int) -> list[Message]:
            """Drop the first and the third step."""
            gone = {2, 3, 6, 7}
            return [drop(m) if i in gone else m for i, m in enumerate(messages)]

    policy: Any = Drops()
    sent = Talk(notices(policy)).send(messages, count=size)
    assert [message["role"] for message in sent] == ["system", "user", "assistant", "tool", "user"]
    assert sent[1]["content"][0] == parts[0]
    assert "2 messages" in sent[1]["content"][1]["text"]
    assert "[Here, 2 messages" in sent[3]["content"]
    assert sent[4] is messages[-1]


def test_messages_before_any_that_could_bear_it() -> None:
    """The first one after the gap does, and the model's own words and instructions stay."""
    messages = [SYSTEM, *steps(("a", "x" * 900), ("b", "y"), start=1), USER]

    class Drops:
        name, mode, trusted = "drops", "amortize", True

        def transform(self, messages: list[Message], turn_idx: int) -> list[Message]:
            """Drop the first step."""
            return [messages[0], *messages[3:]]

    policy: Any = Drops()
    sent = Talk(notices(policy)).send(messages, count=size)
    assert [m is given for m, given in zip(sent, [SYSTEM, *messages[3:]], strict=True)] == [
        True,
        True,
        False,
        True,
    ]


def test_stubs_and_notices_go_together() -> None:
    """A text has its address, and the model is told that it is gone."""
    session = Talk(f"{WINDOW},recallable=true")
    sent = session.send(talk(6), count=size)
    assert "[Here, 8 messages" in str(sent) and "[evicted: 8 messages" in str(sent)
    assert any(map(evicted_by, sent))


def test_what_is_shortened_in_its_place_has_none() -> None:
    """Its placeholder says so itself."""
    session = Talk("truncate_older_than:n=1,max_chars=70,notices=true")
    assert "[Here, " not in str(session.send(talk(4)))
    unchanged = [SYSTEM, USER, asks(call("c")), result("c", "x")]
    assert session.send(unchanged) is unchanged


def test_what_forgets_has_none() -> None:
    """The note would be an edit that forgets; policies that hold such a one are refused, too."""
    with pytest.raises(SpecError, match="notices=true: redact forgets"):
        load_pipeline("redact:pattern=x,notices=true")
    held: Policy = pipeline(*load_pipeline("prune | redact:pattern=x"))
    with pytest.raises(ValueError, match="forgets"):
        notices(held)
