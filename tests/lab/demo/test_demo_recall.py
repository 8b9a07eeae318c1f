"""The demo's questions: in the form that the shipped models know, and what is expected of them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from openai.types.chat import ChatCompletionMessage
from rich.console import Console

from leyline_lab.demo import DEFAULT_POLICY
from leyline_lab.demo.recall import (
    QUESTIONS,
    READS,
    SYSTEM_PROMPT,
    TOOLS,
    TRAINED_MODELS,
    Question,
    RecallAnswer,
    answers_table,
    ask,
    conversation,
    questions,
    said,
)
from leyline_lab.fidelity import recall_task as task
from leyline_lab.fidelity.recall_words import (
    FILES,
    GENERAL,
    KEYS,
    VALUES,
)
from leyline_lab.replay.results import Arm
from leyline_lab.training.train import WORDS
from leyline_replay.models.trained import TRAINED_MODEL_NAMES

IN_SIGHT = Question("feed", "basil", in_sight=True)
CUT = Question("batch", "copper", in_sight=False)


def test_the_session_is_of_the_task() -> None:
    """Prompt, tools and messages are those that the models were trained on."""
    assert set(TRAINED_MODELS) == set(TRAINED_MODEL_NAMES)
    expected = [task.Message("system", task.SYSTEM_PROMPT)]
    for name, output in READS:
        expected += task.read(name, output, task.remark(task.Note.SILENT, {}))
    expected.append(task.ask("feed"))
    ids = [f"read_{number // 4}" for number in range(-1, len(expected) - 1)]
    shown = [message.as_dict(call) for message, call in zip(expected, ids, strict=True)]
    request = ask(IN_SIGHT)
    assert list(request.messages) == shown
    assert request.tools == TOOLS == task.TOOLS
    assert SYSTEM_PROMPT == task.SYSTEM_PROMPT


def test_the_session_uses_words_that_the_models_know() -> None:
    """Names, settings, values and filler are from the lists, and no setting comes twice."""
    lines = [line for _, output in READS for line in output.split("\n")]
    facts = dict(line.split("=") for line in lines if "=" in line)
    filler = {word for line in lines if "=" not in line for word in line.split()}
    assert {name for name, _ in READS} <= set(FILES)
    assert set(facts) <= set(KEYS[:WORDS]) and set(facts.values()) <= set(VALUES[:WORDS])
    assert filler <= set(GENERAL)
    assert len(facts) == len(set(facts.values())) == sum("=" in line for line in lines)
    assert QUESTIONS.items() <= facts.items()


def test_each_request_goes_on_from_the_last() -> None:
    """A session as an agent sends it: nothing is edited by the client."""
    requests = [*conversation(), ask(IN_SIGHT)]
    for shorter, longer in pairwise(requests):
        assert longer.messages[: len(shorter.messages)] == shorter.messages


@pytest.mark.parametrize(
    ("policy", "in_sight"),
    [
        (DEFAULT_POLICY, {"column", "domain"}),
        ("keep_all", {"column", "domain", "batch", "cursor"}),
        ("truncate_older_than:n=0,max_chars=0", {"column", "domain"}),
        ("redact:pattern='=(flint|copper)',replacement='=[gone]'", {"domain", "cursor"}),
    ],
)
def test_what_is_expected_follows_from_the_policy(policy: str, in_sight: set[str]) -> None:
    """A value is expected as long as the edited history shows it."""
    found = questions(policy)
    assert {question.key for question in found if question.in_sight} == in_sight
    assert {question.key: question.value for question in found} == QUESTIONS


def test_expectations_in_words() -> None:
    """The value is expected in sight, else by a look-up."""
    assert (IN_SIGHT.text, IN_SIGHT.expected) == ("What is `feed=`?", "basil")
    assert CUT.expected == "a look-up (was copper)"


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("lookup", '{"line": "batch="}', "a look-up"),
        ("lookup", '{"line": "feed="}', 'lookup {"line": "feed="}'),
        ("run", '{"name": "kilo"}', 'run {"name": "kilo"}'),
    ],
)
def test_calls_are_told_as_what_they_are(name: str, arguments: str, expected: str) -> None:
    """Only a look-up of what was asked for counts as one."""
    function = {"name": name, "arguments": arguments}
    call = {"id": "c", "type": "function", "function": function}
    message = ChatCompletionMessage.model_validate({"role": "assistant", "tool_calls": [call]})
    assert said(message, CUT) == expected


def test_words_are_told_as_they_are() -> None:
    """An answer without a call is its text."""
    assert said(ChatCompletionMessage(role="assistant", content="copper"), CUT) == "copper"


def test_the_table_shows_every_answer() -> None:
    """One row per question, a column per arm; an answer other than what is in sight is red."""
    answers = {
        Arm.RADIX: (RecallAnswer(IN_SIGHT, "basil"), RecallAnswer(CUT, "a look-up")),
        Arm.SPLICE: (RecallAnswer(IN_SIGHT, "[fox]"), RecallAnswer(CUT, "copper")),
    }
    console = Console(record=True, width=100, force_terminal=True)
    console.print(answers_table(answers))
    styled = console.export_text(clear=False, styles=True)
    rows = [line.split() for line in console.export_text().splitlines() if "What is" in line]
    assert rows[0][3:] == ["basil", "basil", "[fox]"]
    assert rows[1][3:] == ["a", "look-up", "(was", "copper)", "a", "look-up", "copper"]
    assert "\x1b[31m[fox]" in styled and styled.count("\x1b[31m") == 1
