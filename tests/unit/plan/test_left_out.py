"""A text that a client drops from an answer is the client's edit; one that it sent is not."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from leyline_engine.contract import Outcome, token_digest
from leyline_proxy.edits.prepare import prepare
from leyline_proxy.model.messages import Message
from leyline_proxy.model.rendered import MessageSpan, Rendered
from leyline_proxy.model.session import Departed, RetainedTurn
from leyline_proxy.model.undeclared import UndeclaredRules
from leyline_proxy.plan.naming import name_spans
from leyline_proxy.plan.synthesis import TurnPlan, synthesize
from leyline_proxy.render.marks import content_spans

SAID = "First the file, as it has to be there before anything else."
CALL = {
    "id": "call_341a4c31b2a2430a952c9895",
    "type": "function",
    "function": {
        "name": "write_file",
        "arguments": '{"path": "notes.txt", "content": "leyline keeps the cache"}',
    },
}
RESULT: Message = {"role": "tool", "tool_call_id": CALL["id"], "content": "24 characters written"}
OPENING: list[Message] = [
    {"role": "system", "content": "You are Clerk, in a folder of a user."},
    {"role": "user", "content": "Current Task: Write notes.txt, then measure it."},
]
CREWAI: Message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
SEMANTIC_KERNEL: Message = {"role": "assistant", "tool_calls": [CALL]}
"""An answer of a text and a call, as these clients send it back."""
WHOLE: Message = {"role": "assistant", "content": SAID, "tool_calls": [CALL]}


def keeping(messages: Sequence[Mapping[str, Any]]) -> str:
    """A template that writes an answer's text and calls."""
    return "".join(f"<{m['role']}>{m.get('content') or ''}{_calls(m)}</>" for m in messages) + (
        "<assistant>"
    )


def dropping(messages: Sequence[Mapping[str, Any]]) -> str:
    """A template that leaves out the text beside calls."""
    return keeping([{**m, "content": ""} if m.get("tool_calls") else m for m in messages])


def _calls(message: Mapping[str, Any]) -> str:
    return "".join(json.dumps(call["function"]) for call in message.get("tool_calls") or ())


def rendered(messages: Sequence[Message], template: Any) -> Rendered:
    """One token per character."""
    text = template(messages)
    spans = content_spans(messages, text, template)
    return Rendered(
        array("q", map(ord, text)),
        tuple(MessageSpan(span.message, span.start, span.end) for span in spans),
        "",
    )


def decode(tokens: Sequence[int]) -> str:
    """Return the text of tokens."""
    return "".join(map(chr, tokens))


def plan(
    sent: Message, undeclared: Mapping[str, str] | None = None, *, template: Any = keeping
) -> TurnPlan:
    """The plan of the turn after an answer of a text and a call that was sent back as ``sent``."""
    before, after = prepare(OPENING, [], [], 0), prepare([*OPENING, sent, RESULT], [], [], 1)
    prompt = rendered(OPENING, template)
    answer = tuple(map(ord, f"{SAID}{_calls(WHOLE)}</>"))
    names = name_spans("t", before, [], Departed(), prompt)
    digest = token_digest(prompt.tokens + array("q", answer))
    turn = RetainedTurn("t", 0, before, prompt, answer, (), None, digest, "m", names=names)
    now = rendered(after.messages, template)
    return synthesize(
        [turn],
        after,
        now,
        UndeclaredRules.parse(undeclared or {}),
        names=name_spans("t1", after, [turn], Departed(), now),
        model_fingerprint="m",
        decode=decode,
    )


def edits(found: TurnPlan) -> set[tuple[str, str, int | None, str]]:
    """Cause, role, message and mode of the plan's edits."""
    return {(edit.cause, edit.role, edit.message, edit.mode) for edit in found.edits}


@pytest.mark.parametrize("sent", [CREWAI, SEMANTIC_KERNEL])
def test_a_dropped_text_is_the_callers_edit_of_its_answer(sent: Message) -> None:
    """A client that keeps only an answer's calls edits that answer, whatever the template does."""
    found = plan(sent, {"template": "amortize"})
    assert edits(found) == {("undeclared", "assistant", 2, "exact")}
    assert found.planned is Outcome.REPREFILLED


@pytest.mark.parametrize("sent", [CREWAI, SEMANTIC_KERNEL])
def test_the_mapped_role_keeps_the_calls(sent: Message) -> None:
    """The call that follows a dropped text is copied if answers are amortized."""
    found = plan(sent, {"assistant": "amortize"})
    assert edits(found) == {("undeclared", "assistant", 2, "amortize")}
    assert found.planned is Outcome.SPLICED
    assert found.reusable_tokens >= len(keeping(OPENING)) + len(_calls(WHOLE))


def test_a_text_that_was_sent_back_is_the_templates_to_drop() -> None:
    """If the caller's message has the text, only the template can have left it out."""
    found = plan(WHOLE, {"template": "amortize"}, template=dropping)
    assert edits(found) == {("template", "template", None, "amortize")}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_a_text_that_was_sent_back_as_reasoning_is_the_templates_to_drop(name: str) -> None:
    """Thinking without marks that the caller sends back is no edit of the caller's."""
    found = plan({**CREWAI, name: SAID}, {"template": "amortize"})
    assert edits(found) == {("template", "template", None, "amortize")}


def test_an_answer_sent_back_whole_is_no_edit() -> None:
    """The text and the call as the model wrote them continue the turn."""
    assert edits(plan(WHOLE)) == set()
