"""The log of policies' faults: where a policy raised, seldom, and none of the prompt's words."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.fake_engine import MODEL, FakeEngine, proxy_before

from leyline_policies import Message, Policy, function_policy
from leyline_proxy.edits.fault_origins import FaultLog, origin_of
from leyline_proxy.model.prepared import PolicyFault

CHAT = "/v1/chat/completions"
SECRET = "the words of a prompt"
SOURCE = Path(__file__).read_text().splitlines()
TALK = {"model": MODEL, "messages": [{"role": "user", "content": SECRET}]}


def inner(text: str) -> None:
    """Fail, with the prompt in the message, a note, and a variable."""
    error = KeyError(text)
    error.add_note(text)
    raise error from ValueError(text)


@function_policy(name="tidies")
def tidies(messages: list[Message], turn_idx: int) -> list[Message]:
    """Fail in a call of its own."""
    inner(messages[0]["content"])
    return messages


@function_policy(name="hides", mode="forget")
def hides(messages: list[Message], turn_idx: int) -> list[Message]:
    """Fail where text is to be forgotten."""
    inner(messages[0]["content"])
    return messages


@function_policy(name="leaves")
def leaves(messages: list[Message], turn_idx: int) -> list[Message]:
    """End more than the request."""
    sys.exit(messages[0]["content"])


@pytest.mark.parametrize(
    ("policy", "error", "innermost", "status"),
    [
        (tidies, "KeyError", "inner", 200),
        (hides, "KeyError", "inner", 502),
        (leaves, "SystemExit", "leaves", 200),
    ],
)
async def test_the_log_names_type_file_and_line_but_no_words(
    policy: Policy, error: str, innermost: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that raises is found by its own innermost calls; a repeat within the minute adds no
    line."""
    monkeypatch.setattr("leyline_proxy.tenants.tenant.load_pipeline", lambda _: (policy,))
    async with proxy_before(FakeEngine(), policy="patched", log_level="error") as client:
        with capture_logs() as logged:
            answers = [await client.post(CHAT, json=TALK) for _ in range(3)]
    assert {answer.status_code for answer in answers} == {status}
    (line,) = [each for each in logged if each["event"] == "policy_failed"]
    assert (line["policy"], line["fault"], line["error"]) == (policy.name, "raised", error)
    path, _, place = line["frames"][-1].rpartition(":")
    number, name = place.split()
    assert (Path(path), name) == (Path(__file__), innermost)
    assert SOURCE[int(number) - 1].strip().startswith(("raise error", "sys.exit"))
    assert not any("leyline_proxy" in frame for frame in line["frames"])
    assert SECRET not in json.dumps(logged, default=repr)
    assert not any(SECRET in answer.text for answer in answers if status != 200)


def _raised(depth: int) -> BaseException:
    def dig(left: int) -> None:
        if not left:
            raise RuntimeError(SECRET)
        dig(left - 1)

    try:
        dig(depth)
    except RuntimeError as error:
        return error
    raise AssertionError


def test_a_deep_recursion_is_shown_by_its_end() -> None:
    """However deep a policy called itself, some of its innermost calls are kept."""
    origin = origin_of(_raised(500))
    assert len(origin.frames) == 8
    assert origin.frames[-1].endswith(" dig")


def test_repeats_are_counted_and_each_kind_has_its_own_minute() -> None:
    """A line after a minute says how often the fault came meanwhile; another fault doesn't wait;
    the number of remembered kinds is bounded."""
    now = [0.0]
    book, fault = FaultLog(lambda: now[0]), PolicyFault("p", "raised", origin_of(_raised(1)))

    def lines(*faults: PolicyFault) -> list[Any]:
        with capture_logs() as logged:
            for each in faults:
                book.add(each, "red")
        return [(each["fault"], each["repeats"]) for each in logged]

    assert lines(fault, fault, fault) == [("raised", 0)]
    assert lines(PolicyFault("p", "mutated")) == [("mutated", 0)]
    now[0] = 59.0
    assert lines(fault) == []
    now[0] = 60.0
    assert lines(fault, fault) == [("raised", 3)]
    others = [PolicyFault(f"other {number}", "raised") for number in range(300)]
    assert len(lines(*others)) == 300
    assert len(book._seen) == 256
