"""compact_on_request: the model says when."""

from __future__ import annotations

from typing import Any

import pytest
from talking import Talk
from tool_talks import SYSTEM, USER, asks, call, result, steps

from leyline_policies import Message, Policy, SpecError, load_pipeline
from leyline_policies.builtin.compact_on_request import TOOL, CompactOnRequest
from leyline_policies.builtin.relevance import Relevance
from leyline_policies.builtin.summarize import Summarize

SPEC = "compact_on_request:policies=['sliding_window:max_messages=4,keep_messages=2']"


def request(identity: str, arguments: str = "{}") -> list[Message]:
    """A call of the tool, and the harness's answer."""
    name = TOOL["function"]["name"]
    return [asks(call(identity, name, arguments)), result(identity, "ok")]


def work(number: int, start: int = 0) -> list[Message]:
    """So many steps."""
    return steps(*(("bash", f"out {i}") for i in range(number)), start=start)


HISTORY = [SYSTEM, USER, *work(4)]
ASKED = [*HISTORY, *request("r1")]


def test_nothing_happens_until_the_model_asks() -> None:
    """However long the conversation is; a call without an answer is no request yet."""
    talk = Talk(SPEC)
    assert talk.send(HISTORY) is HISTORY
    pending = [*HISTORY, asks(call("r1", "compact_context"))]
    assert talk.send(pending) is pending


def test_what_had_been_said_is_compacted_and_newer_messages_stay() -> None:
    """The compacted part is the same on every later turn, and the model sees that it asked."""
    talk = Talk(SPEC)
    sent = talk.send(ASKED)
    assert sent == [SYSTEM, USER, *ASKED[-2:]]
    later = [*ASKED, *work(5, start=20)]
    assert talk.send(later) == [*sent, *later[len(ASKED) :]]
    again = [*later, *request("r2")]
    assert talk.send(again) == [SYSTEM, USER, *again[-2:]]


def test_it_depends_on_the_messages_alone() -> None:
    """A proxy that sees only the last request sends the same."""
    later = [*ASKED, *work(3, start=20), *request("r2"), *work(2, start=40)]
    talk = Talk(SPEC)
    for end in range(2, len(later) + 1):
        sent = talk.send(later[:end])
    assert Talk(SPEC).send(later) == sent


def test_a_call_beside_others_waits_for_all_their_results() -> None:
    """No result is separated from its call."""
    both = [asks(call("r1", "compact_context"), call("x")), result("r1", "ok")]
    talk = Talk(SPEC)
    pending = [*HISTORY, *both]
    assert talk.send(pending) == pending
    sent = talk.send([*pending, result("x", "late")])
    assert sent == [SYSTEM, USER, *both, result("x", "late")]


def test_a_refused_request_says_why() -> None:
    """Too little is new, there were too many, or one is scheduled; the words stay the same."""
    talk = Talk(f"{SPEC},min_tokens=50,max_requests=2")
    messages = [*ASKED, *request("r2")]
    sent = talk.send(messages)
    assert sent[-1]["content"] == (
        "ok\n\n[Not compacted: the history has grown by about 20 tokens, less than the minimum of "
        "50, so compacting would save little.]"
    )
    assert sent[:-2] == [SYSTEM, USER, *ASKED[-2:]]
    messages += [*work(2, start=20), *request("r3"), *work(4, start=40), *request("r4")]
    later = talk.send(messages)
    assert later[-1]["content"].endswith("the limit of 2 compaction requests has been reached.]")
    assert talk.send(messages) == later
    twice = [
        *HISTORY,
        asks(call("a", "compact_context"), call("b", "compact_context")),
        result("a", "ok"),
        result("b", "ok"),
    ]
    told = [message["content"] for message in Talk(SPEC).send(twice)[-2:]]
    assert told == [
        "ok",
        "ok\n\n[Not compacted: a compaction is already scheduled before your next turn.]",
    ]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"focus": "the plan"}', True),
        ("{}", False),
        ("no", False),
        ('{"focus": 3}', False),
        ("[]", False),
    ],
)
@pytest.mark.parametrize(
    "policy",
    [
        Relevance(trigger_tokens=1, keep_tokens=5),
        Summarize(trigger_tokens=1, keep_messages=1),
        Summarize(trigger_tokens=1, keep_messages=1, model="another"),
    ],
    ids=["judge", "summary", "summary by another"],
)
def test_the_focus_reaches_the_model(policy: Policy, arguments: str, shown: bool) -> None:
    """A policy that can give weight to it gets it; arguments that can't be read are none."""
    talk = Talk(CompactOnRequest((policy,)))
    talk.send([*HISTORY, *request("r1", arguments)])
    (question,) = talk.wanted
    assert ("weight to: the plan" in str(question.messages)) is shown


@pytest.mark.parametrize(
    "settings",
    [
        "policies=[]",
        "policies=[prune],min_tokens=0",
        "policies=[prune],max_requests=0",
        "policies=[redact]",
    ],
)
def test_bad_settings_are_refused(settings: str) -> None:
    """The message names the setting."""
    key: Any = settings.rpartition(",")[2].partition("=")[0]
    with pytest.raises(SpecError, match=key):
        load_pipeline(f"compact_on_request:{settings}")
