"""remove_regex, case by case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tool_talks import SYSTEM, asks, call, result, sent

from leyline_policies import Message, SpecError, load_pipeline
from leyline_policies.builtin.patterns import PatternTimeoutError
from leyline_policies.builtin.remove_regex import RemoveRegex

FIXTURES = Path(__file__).parents[2] / "fixtures" / "policies"
DIFF = "a<diff>\n-x\n+y\n</diff>b"


def _user(content: Any) -> Message:
    return {"role": "user", "content": content}


def test_default_removes_diffs() -> None:
    """The text between the tags goes, over line breaks, in strings and in text parts."""
    part = {"type": "text", "text": DIFF}
    image = {"type": "image_url", "image_url": {"url": "<diff></diff>"}}
    after = sent(RemoveRegex(), [_user(DIFF), _user([part, image])])
    assert after == [_user("ab"), _user([{**part, "text": "ab"}, image])]


def test_newest_messages_stay_whole() -> None:
    """The last ``keep_last`` messages are not searched."""
    messages = [_user(DIFF), _user(DIFF), _user(DIFF)]
    assert [m["content"] for m in sent(RemoveRegex(keep_last=2), messages)] == ["ab", DIFF, DIFF]


def test_instructions_and_arguments_stay() -> None:
    """Instructions are no history, and the arguments of a call are what was called."""
    messages = [{**SYSTEM, "content": DIFF}, asks(call("1", arguments=DIFF)), result("1", DIFF)]
    assert sent(RemoveRegex(), messages) == [*messages[:2], result("1", "ab")]


def test_patterns_apply_one_after_another() -> None:
    """The second sees what the first left, and flags at a pattern's beginning hold."""
    policy = RemoveRegex(("b", "(?i)A+C"))
    assert sent(policy, [_user("xaAbcy")])[0]["content"] == "xy"


def test_a_pattern_without_end_fails_the_turn() -> None:
    """Matching has a budget: the policy gives up rather than hold up the request."""
    with pytest.raises(PatternTimeoutError):
        sent(RemoveRegex(("(?=a)(a|aa)+$",)), [_user("a" * 60 + "b")])


@pytest.mark.parametrize(
    ("settings", "words"),
    [("remove=[]", "remove="), ('remove="("', "no regular expression"), ("keep_last=-1", "-1")],
)
def test_bad_settings_are_refused(settings: str, words: str) -> None:
    """The message says which setting is wrong."""
    with pytest.raises(SpecError, match=words):
        load_pipeline(f"remove_regex:{settings}")


def _cases() -> list[dict[str, Any]]:
    recorded = json.loads((FIXTURES / "remove_regex.json").read_text(encoding="utf-8"))
    return list(recorded["cases"])


@pytest.mark.parametrize("case", _cases(), ids=lambda case: case["name"])
def test_same_as_swe_agent(case: dict[str, Any]) -> None:
    """The history is what SWE-agent's own processor makes of it, and another setting's is not."""
    given, expected = case["history"], case["expected"]
    assert sent(RemoveRegex(tuple(case["remove"]), case["keep_last"]), given) == expected
    assert sent(RemoveRegex(("never there",), case["keep_last"]), given) != expected
