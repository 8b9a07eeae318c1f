"""drop_failed_calls, case by case."""

from __future__ import annotations

from typing import Any

import pytest

from leyline_policies import Message
from leyline_policies.builtin.drop_failed_calls import DropFailedCalls
from leyline_policies.failures import is_failure, is_failure_text

FAILED, FINE = "<returncode>1</returncode>\nno", "<returncode>0</returncode>\nyes"


def _call(identity: str, tool: str = "bash") -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": tool, "arguments": "{}"}}


def _asks(*calls: dict[str, Any], content: Any = None, **more: Any) -> Message:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **more}


def _result(identity: str, content: Any) -> Message:
    return {"role": "tool", "tool_call_id": identity, "content": content}


USER: Message = {"role": "user", "content": "fix it"}


def _apply(*messages: Message, pattern: str | None = None) -> list[Message]:
    return DropFailedCalls(pattern).transform(list(messages), 0)


def test_retried_failure_goes_with_its_result() -> None:
    """A failed call and its result go once the same tool has worked later."""
    retry = [_asks(_call("b")), _result("b", FINE)]
    assert _apply(USER, _asks(_call("a")), _result("a", FAILED), *retry) == [USER, *retry]


def test_failure_without_success_stays() -> None:
    """A failure stays while no later call of that tool has succeeded."""
    messages = [
        USER,
        _asks(_call("a")),
        _result("a", FAILED),
        _asks(_call("b", "read")),
        _result("b", FINE),
        _asks(_call("c")),
        _result("c", FAILED),
        _asks(_call("d")),
    ]
    assert _apply(*messages) == messages


def test_only_the_failed_call_of_several_goes() -> None:
    """When a message made several calls, the others and their results stay."""
    both = _asks(_call("a"), _call("b", "read"), x_unknown=1)
    rest = [_result("b", FINE), _asks(_call("c")), _result("c", FINE)]
    after = _apply(USER, both, _result("a", FAILED), *rest)
    assert after == [USER, _asks(_call("b", "read"), x_unknown=1), *rest]
    assert len(both["tool_calls"]) == 2


def test_call_of_the_same_message_is_no_retry() -> None:
    """A parallel call of the same tool says nothing about the one that failed."""
    messages = [USER, _asks(_call("a"), _call("b")), _result("a", FAILED), _result("b", FINE)]
    assert _apply(*messages) == messages


@pytest.mark.parametrize(
    ("content", "stays"),
    [
        ("Let me look.", True),
        ([{"type": "text", "text": "Let me look."}], True),
        ([{"type": "refusal", "refusal": "no"}], True),
        ([{"type": "text", "text": ""}], False),
        ("\n", False),
        ("", False),
        (None, False),
    ],
)
def test_text_of_the_message_stays(content: Any, stays: bool) -> None:
    """An assistant message keeps its own text when its only call is dropped."""
    retry = [_asks(_call("b")), _result("b", FINE)]
    after = _apply(USER, _asks(_call("a"), content=content), _result("a", FAILED), *retry)
    said = [{"role": "assistant", "content": content}] if stays else []
    assert after == [USER, *said, *retry]


def test_reused_ids_pair_with_the_latest_call() -> None:
    """A harness that counts its ids from zero on every turn gets the right pairs dropped."""
    retry = [_asks(_call("0")), _result("0", FINE)]
    assert _apply(USER, _asks(_call("0")), _result("0", FAILED), *retry) == [USER, *retry]


def test_function_calls_of_the_older_api() -> None:
    """The older function_call and its function result are a pair as well."""

    def pair(content: str) -> list[Message]:
        asked = {"name": "bash", "arguments": "{}"}
        return [
            {"role": "assistant", "content": None, "function_call": asked},
            {"role": "function", "name": "bash", "content": content},
        ]

    assert _apply(USER, *pair(FAILED), *pair(FINE)) == [USER, *pair(FINE)]


def test_own_pattern_replaces_the_signs() -> None:
    """With pattern, a failure is what the pattern matches and nothing else."""
    first = [_asks(_call("a")), _result("a", FAILED)]
    second = [_asks(_call("b")), _result("b", "oh NO")]
    third = [_asks(_call("c")), _result("c", "fine")]
    assert _apply(USER, *first, *second, *third, pattern="NO$") == [USER, *first, *third]


@pytest.mark.parametrize(
    "text",
    [
        "<returncode>1</returncode>\n<output>\n</output>",
        "<exception>timed out</exception>\n<returncode>-1</returncode>",
        '{"exit_code": 1, "output": ""}',
        '{"output": "x", "metadata": {"exit_code": 2, "duration_seconds": 0.1}}',
        '{"error": "not found"}',
        '{"is_error": true, "content": ""}',
        '{"isError": true}',
        '{"output": "cut off", "exit_code": 1, "more": "...',
        "Error: no such file",
        "ERROR:\nInvalid `path` parameter",
        "Traceback (most recent call last):\n  File ...",
        "ModuleNotFoundError: No module named 'numpy'",
        "exit code: 1\nls: cannot access",
        "Exit code 127\nbash: foo",
        "Process exited with code 1\nOutput:\n",
        "long output\n" * 50 + "[Command finished with exit code 1]",
    ],
)
def test_failures_are_recognised(text: str) -> None:
    """The documented signs of failure are seen."""
    assert is_failure_text(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<returncode>0</returncode>\n<output>\nError: this is a quoted log\n</output>",
        '{"exit_code": 0, "output": "Error: quoted", "error": null}',
        '{"error": "", "is_error": false, "exit_code": 0}',
        '{"flights": ["error"]}',
        "[1, 2]",
        "errors found: 0",
        "def f():\n    raise ValueError('Error: x')",
        "Traceback of the call\n...\n[Command finished with exit code 0]",
        "x\n" * 20 + "exit code: 1\n" + "y\n" * 20,
        "the command ended with an exit code 1 as documented in the manual",
    ],
)
def test_mentions_of_failure_are_not_failures(text: str) -> None:
    """Output that only talks about errors, or that says it succeeded, is no failure."""
    assert not is_failure_text(text)


def test_flag_on_the_message_is_a_failure() -> None:
    """A message marked is_error failed whatever its text says."""
    assert is_failure({"role": "tool", "content": "ok", "is_error": True})
