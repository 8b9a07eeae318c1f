"""deduplicate_reads, case by case."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tool_talks import USER, asks, call, contents, result, sent

from leyline_policies import Message, SpecError, load_pipeline
from leyline_policies.builtin.deduplicate_reads import DeduplicateReads

STUB = "[superseded file read]"


def _reads(*asked: dict[str, Any], tool: str = "read_file", text: str = "text") -> list[Message]:
    messages = [USER]
    for place, arguments in enumerate(asked):
        messages.append(asks(call(f"c{place}", tool, json.dumps(arguments))))
        messages.append(result(f"c{place}", f"{text} {place}"))
    return messages


def test_only_the_newest_reading_stays() -> None:
    """Earlier readings of a file become a stub; other files, calls and messages stay."""
    messages = _reads({"path": "a"}, {"path": "b"}, {"path": "./a"}, {"path": "a"})
    after = sent(DeduplicateReads(), messages)
    assert contents(after) == [STUB, "text 1", STUB, "text 3"]
    assert after[1] is messages[1]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (({"path": "a", "offset": 0}, {"path": "a", "offset": 9}), ["text 0", "text 1"]),
        (({"path": "a", "offset": 9}, {"path": "a", "offset": 9}), [STUB, "text 1"]),
        (({"path": "a", "offset": 9}, {"path": "a"}), [STUB, "text 1"]),
        (({"path": "a"}, {"path": "a", "offset": 9}), ["text 0", "text 1"]),
        (({"path": "a", "limit": None}, {"path": "a"}), [STUB, "text 1"]),
        (({"path": "a", "explanation": "x"}, {"path": "a", "explanation": "y"}), [STUB, "text 1"]),
    ],
)
def test_a_part_gives_way_to_the_same_part_or_the_whole(
    asked: tuple[dict[str, Any], ...], expected: list[str]
) -> None:
    """Lines that a later reading doesn't show are kept."""
    assert contents(sent(DeduplicateReads(), _reads(*asked))) == expected


def test_ignored_keys_say_nothing_of_the_part() -> None:
    """With the range ignored, any later reading of the file counts."""
    messages = _reads({"path": "a", "offset": 0}, {"path": "a", "offset": 9})
    policy = DeduplicateReads(ignore_keys=("offset",))
    assert contents(sent(policy, messages)) == [STUB, "text 1"]


def test_a_failed_reading_replaces_none() -> None:
    """An earlier reading stays when reading again failed, and the failure does too."""
    messages = _reads({"path": "a"}, {"path": "a"})
    messages[-1]["content"] = "Error: no such file"
    assert contents(sent(DeduplicateReads(), messages)) == ["text 0", "Error: no such file"]


def test_a_reading_without_a_result_replaces_none() -> None:
    """While the newest call is unanswered, the text of the one before is all there is."""
    messages = _reads({"path": "a"}, {"path": "a"})[:-1]
    assert contents(sent(DeduplicateReads(), messages)) == ["text 0"]


def test_a_tool_of_many_commands_reads_with_some() -> None:
    """An editor's other commands are no readings."""
    asked = ({"command": command, "path": "a"} for command in ("view", "create", "view"))
    messages = _reads(*asked, tool="str_replace_editor")
    assert contents(sent(DeduplicateReads(), messages)) == [STUB, "text 1", "text 2"]


def test_tools_and_path_keys_are_the_callers() -> None:
    """Only the named tools read, and only the named arguments are paths."""
    messages = _reads({"where": "a"}, {"where": "a"}, tool="slurp")
    assert sent(DeduplicateReads(), messages) == messages
    policy = DeduplicateReads(tools=("slurp",), path_keys=("where",), placeholder="-")
    assert contents(sent(policy, messages)) == ["-", "text 1"]


def test_arguments_that_cannot_be_read_are_left_alone() -> None:
    """Broken JSON, lists and paths that are no text make no reading."""
    messages = _reads({"path": 1}, {"path": 1})
    for place, broken in ((1, "{"), (3, "[]")):
        messages[place]["tool_calls"][0]["function"]["arguments"] = broken
    assert sent(DeduplicateReads(), messages) == messages


@pytest.mark.parametrize("key", ["tools", "path_keys"])
def test_empty_lists_are_refused(key: str) -> None:
    """A policy that could never act says so when it is built."""
    with pytest.raises(SpecError, match=f"{key}="):
        load_pipeline(f"deduplicate_reads:{key}=[]")
