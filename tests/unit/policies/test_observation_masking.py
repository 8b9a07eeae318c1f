"""observation_masking: what OpenHands' condenser did, and what is ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tool_talks import SYSTEM, USER, asks, call, contents, result, sent, talk

from leyline_policies import Message
from leyline_policies.builtin.observation_masking import ObservationMasking

FIXTURE = json.loads(
    (Path(__file__).parents[2] / "fixtures" / "policies" / "openhands.json").read_text("utf-8")
)


def _messages(kinds: str) -> tuple[list[Message], dict[int, int]]:
    """A view's events as chat messages, and which message each observation became."""
    messages: list[Message] = []
    places: dict[int, int] = {}
    open_calls: list[str] = []
    for event, kind in enumerate(kinds):
        if kind == "a" and event and kinds[event - 1] == "a":
            messages[-1]["tool_calls"].append(call(f"c{event}"))
            open_calls.append(f"c{event}")
        elif kind == "a":
            messages.append(asks(call(f"c{event}")))
            open_calls = [f"c{event}"]
        elif kind == "o":
            places[event] = len(messages)
            messages.append(result(open_calls.pop(0), f"seen {event}"))
        else:
            messages.append({"s": SYSTEM, "m": USER}[kind])
    return messages, places


def _cases() -> list[Any]:
    return [
        pytest.param(case, id=f"window-{case['attention_window']}-events-{case['events']}")
        for case in FIXTURE["cases"]
    ]


@pytest.mark.parametrize("case", _cases())
def test_openhands_masks_the_same(case: dict[str, Any]) -> None:
    """Text that OpenHands masked in a view is masked in its chat messages, with the same text."""
    messages, places = _messages(FIXTURE["events"][: case["events"]])
    after = sent(ObservationMasking(attention_window=case["attention_window"]), messages)
    masked = {places[int(event)]: text for event, text in case["masked"].items()}
    assert [message["content"] for message in after] == [
        masked.get(index, message["content"]) for index, message in enumerate(messages)
    ]


def test_fixture_tells_windows_apart() -> None:
    """The fixture holds cases in which a window off by one masks something else."""
    case = next(c for c in FIXTURE["cases"] if c["attention_window"] == 5 and c["events"] == 25)
    messages, _ = _messages(FIXTURE["events"])
    right = contents(sent(ObservationMasking(attention_window=5), messages))
    assert right.count("<MASKED>") == len(case["masked"])
    assert contents(sent(ObservationMasking(attention_window=4), messages)) != right


def test_masked_results_answer_their_calls() -> None:
    """A masked result keeps its role and id, so that its call stays answered."""
    messages = talk(("bash", "one"), ("bash", "two"))
    after = sent(ObservationMasking(attention_window=1, placeholder="-"), messages)
    assert after[3] == {"role": "tool", "tool_call_id": "c0", "content": "-"}
    assert after[5] is messages[5]


def test_window_must_hold_an_event() -> None:
    """A window of no event is refused, by name."""
    with pytest.raises(ValueError, match="attention_window=0"):
        ObservationMasking(attention_window=0)
