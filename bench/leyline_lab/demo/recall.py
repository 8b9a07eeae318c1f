"""Questions with known answers that show the model's knowledge after its history was edited.

The shipped models know one task: they read settings with tools, answer with a setting's value if
the session has shown it, and look it up if not. A short session of that kind is played against a
stack whose policy shortens old outputs. Then the model is asked for settings, some of which were in
the cut text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from rich.markup import escape
from rich.table import Table

from leyline_lab.fidelity.recall_task import SYSTEM_PROMPT, TOOLS
from leyline_policies import PolicyError, load_pipeline
from leyline_proxy.edits.prepare import prepare
from leyline_proxy.model.messages import Message

from ..replay.results import Arm
from ..tables import figures_table
from ..traces.recordings import TraceRequest

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessage

    from ..replay.driver import ChatDriver

TRAINED_MODELS: Final = frozenset(
    {"leyline-recall", "leyline-recall-notes", "leyline-recall-thinking"}
)
"""Served names of the models that know the task."""
READS: Final = (
    (
        "north",
        "some files found in the working directory\n"
        "check the result and read each line again before the next step\n"
        "batch=copper\n"
        "cursor=dolphin\n"
        "no error found while the module was open and all checks passed\n"
        "write the result and close the file",
    ),
    ("alpha", "agent=garnet\nfolder=cedar"),
    ("march", "depth=crow"),
    ("spring", "bucket=ginger\nasset=dawn"),
    ("friday", "engine=birch"),
    ("victor", "domain=clover\naudit=amber"),
    ("oscar", "cookie=goose"),
    ("june", "format=emerald\nbanner=fox"),
    ("kilo", "feed=basil"),
    ("lima", "column=flint\nclock=ebony"),
)
"""Names to read in turn, and the tool's outputs."""
QUESTIONS: Final = {"column": "flint", "domain": "clover", "batch": "copper", "cursor": "dolphin"}
"""Settings to ask for, with their values."""
ANSWER_TOKENS = 32  # the longest right answer, a look-up, has about 18


@dataclass(frozen=True, slots=True)
class Question:
    """A setting to ask for."""

    key: str
    value: str
    in_sight: bool
    """True if the edited history shows the value."""

    @property
    def text(self) -> str:
        """The question for the model."""
        return f"What is `{self.key}=`?"

    @property
    def expected(self) -> str:
        """The answer of a model that knows only the edited history."""
        return self.value if self.in_sight else f"a look-up (was {self.value})"


@dataclass(frozen=True, slots=True)
class RecallAnswer:
    """A stack's answer to a question."""

    question: Question
    given: str
    """The answer's text; ``a look-up``, or the called tool with its arguments."""

    @property
    def wrong(self) -> bool:
        """True if the value was in sight and the answer differs."""
        return self.question.in_sight and self.given != self.question.value


def conversation() -> list[TraceRequest]:
    """Return the requests of the session before the questions, one after each tool output."""
    requests: list[TraceRequest] = []
    history: tuple[Message, ...] = ({"role": "system", "content": SYSTEM_PROMPT},)
    for number, (name, output) in enumerate(READS):
        function = {"name": "read_config", "arguments": json.dumps({"name": name})}
        call = {"id": f"read_{number}", "type": "function", "function": function}
        shown = (
            *history,
            {"role": "user", "content": f"Read `{name}`."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": output},
        )
        requests.append(TraceRequest(shown, TOOLS))
        history = (*shown, {"role": "assistant", "content": "Done."})
    return requests


def ask(question: Question) -> TraceRequest:
    """Return the request that asks a question after the session."""
    *_, last = conversation()
    done = {"role": "assistant", "content": "Done."}
    return TraceRequest((*last.messages, done, {"role": "user", "content": question.text}), TOOLS)


def questions(policy: str) -> list[Question]:
    """Return the questions, each with its visibility in the history that ``policy`` has edited.

    Raises:
        PolicyError: the policy isn't installed here, or its specification is wrong.
    """
    stages = load_pipeline(policy)
    found: list[Question] = []
    for key, value in QUESTIONS.items():
        asked = ask(Question(key, value, in_sight=True)).messages
        sent = prepare(asked, stages, (), turn_index=len(READS)).messages
        texts = [str(message.get("content")) for message in sent]
        found.append(Question(key, value, any(f"{key}={value}" in text for text in texts)))
    return found


def ask_all(driver: ChatDriver, policy: str) -> tuple[RecallAnswer, ...]:
    """Play the session against a stack and ask the questions, each after the same history.

    Every request is sent, so the stack holds the text that it later edits; the model's answers in
    between are discarded. No questions are asked of a model that doesn't know the task, or under a
    policy that only the stack knows: no answers can then be expected.

    Raises:
        StackError: the stack fails, or refuses a request.
    """
    try:
        asked = questions(policy)
    except PolicyError:
        return ()
    if driver.model not in TRAINED_MODELS:
        return ()
    session = f"recall-{uuid4().hex[:8]}"
    for request in conversation():
        driver.answer(request, session=session, max_tokens=1)
    return tuple(
        RecallAnswer(
            question,
            said(driver.answer(ask(question), session=session, max_tokens=ANSWER_TOKENS), question),
        )
        for question in asked
    )


def said(message: ChatCompletionMessage, question: Question) -> str:
    """Return an answer in a few words."""
    calls = [call.function for call in message.tool_calls or () if call.type == "function"]
    if not calls:
        return message.content or ""
    looked_up = json.dumps({"line": f"{question.key}="})
    if [(call.name, call.arguments) for call in calls] == [("lookup", looked_up)]:
        return "a look-up"
    return ", ".join(f"{call.name} {call.arguments}" for call in calls)


def answers_table(answers: Mapping[Arm, Sequence[RecallAnswer]]) -> Table:
    """Return one row per question: the expected answer and each arm's, wrong ones in red."""
    caption = (
        "A look-up is expected where the policy has cut the value out of the history. KV "
        "that was spliced has read the value and may still tell it."
    )
    columns = ("question", "expected", *(arm.value for arm in answers))
    table = figures_table("What the model answers afterwards", columns, (), caption=caption)
    for column in table.columns:
        column.no_wrap = False
    for row in zip(*answers.values(), strict=True):
        question = row[0].question
        given = [
            f"[red]{escape(answer.given)}[/red]" if answer.wrong else escape(answer.given)
            for answer in row
        ]
        table.add_row(question.text, question.expected, *given)
    return table
