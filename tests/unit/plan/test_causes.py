"""The author of each change, and so its mode: one change at a time, then several in one place."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.character_turns import Rule

from leyline_engine.contract import Mode, Outcome, token_digest
from leyline_proxy.edits.prepare import prepare
from leyline_proxy.model.messages import Message
from leyline_proxy.model.prepared import Prepared
from leyline_proxy.model.rendered import MessageSpan, Rendered
from leyline_proxy.model.session import Departed, RetainedTurn
from leyline_proxy.model.undeclared import UndeclaredRules
from leyline_proxy.plan.naming import name_spans
from leyline_proxy.plan.synthesis import TurnPlan, synthesize
from leyline_proxy.render.marks import content_spans
from leyline_proxy.request.declared import DeclaredEdit

BEHIND = "and all that comes behind the change is long enough to be copied"


def render(messages: Sequence[Mapping[str, Any]]) -> str:
    """A template that writes everything as it is."""
    return "".join(f"<{m['role']}>{m['content']}</>" for m in messages) + "<assistant>"


def looking(messages: Sequence[Mapping[str, Any]]) -> str:
    """A template that looks at a content, so that marks can't be used, and drops one message."""
    first = "[" if str(messages[0]["content"]).startswith("<x>") else "("
    return first + render([m for m in messages if m.get("name") != "unseen"])


def rendered(messages: Sequence[Message], template: Any = render, context: str = "") -> Rendered:
    """One token per character."""
    text = template(messages)
    spans = content_spans(messages, text, template)
    return Rendered(
        array("q", map(ord, text)),
        tuple(MessageSpan(span.message, span.start, span.end) for span in spans),
        context,
    )


def plan(
    before: Prepared,
    after: Prepared,
    undeclared: Mapping[str, str] | None = None,
    *,
    template: Any = render,
    context: str = "",
) -> TurnPlan:
    """The plan of a turn against one retained turn."""
    tokens = rendered(before.messages, template)
    names = name_spans("t", before, [], Departed(), tokens)
    digest = token_digest(tokens.tokens)
    turn = RetainedTurn("t", 0, before, tokens, (), (), None, digest, "m", names=names)
    prompt = rendered(after.messages, template, context)
    return synthesize(
        [turn],
        after,
        prompt,
        UndeclaredRules.parse(undeclared or {}),
        names=name_spans("t1", after, [turn], Departed(), prompt),
        model_fingerprint="m",
    )


def talk(role: str, text: str) -> list[Message]:
    """A conversation with one message of ``role`` in its middle."""
    middle: Message = {"role": role, "content": text}
    return [
        {"role": "system", "content": "a system prompt that is longer than the sink is wide"},
        middle,
        {"role": "user", "content": BEHIND},
    ]


def modes(found: TurnPlan) -> set[tuple[str, str]]:
    """Causes and modes of the plan's edits."""
    return {(edit.cause, edit.mode) for edit in found.edits}


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "function"])
@pytest.mark.parametrize("mapped", ["system", "user", "assistant", "tool", "template"])
def test_only_the_mapped_role_is_amortised(role: str, mapped: str) -> None:
    """Each role answers for itself; developers are systems, functions are tools."""
    before = prepare(talk(role, "one text that is to be changed"), [], [], 0)
    after = prepare(talk(role, "another text"), [], [], 1)
    same = {"developer": "system", "function": "tool"}.get(role, role) == mapped
    found = plan(before, after, {mapped: "amortize"})
    assert modes(found) == {("undeclared", "amortize" if same else "exact")}
    assert (found.planned is Outcome.SPLICED) == same


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_a_policy_and_the_caller_in_one_message_are_exact(role: str) -> None:
    """A policy's licence doesn't cover what the caller changed beside it."""
    before = prepare(talk(role, "a policy shortens this; the caller wrote that"), [], [], 0)
    changed = talk(role, "a policy shortens this; the caller meant this")
    found = plan(before, prepare(changed, [Rule("a policy shortens this", "cut")], [], 1))
    assert {("undeclared", "exact"), ("policy:rule", "amortize")} == modes(found)
    assert found.planned is not Outcome.SPLICED


def test_a_policy_switched_off_is_still_its_edit() -> None:
    """The text comes back as it was: the caller changed nothing."""
    messages = talk("user", "a long text that the policy cuts")
    before = prepare(messages, [Rule("a long text that the policy cuts", "cut")], [], 0)
    found = plan(before, prepare(messages, [], [], 1))
    assert modes(found) == {("policy:rule", "amortize")}


def test_a_caller_who_copies_a_policys_edit_has_edited() -> None:
    """The sent text is the same, so nothing changed; back to the original is the caller's own."""
    messages = talk("user", "a long text that the policy cuts")
    before = prepare(messages, [Rule("a long text that the policy cuts", "cut")], [], 0)
    assert plan(before, prepare(talk("user", "cut"), [], [], 1)).planned is Outcome.UNEDITED
    found = plan(before, prepare(talk("user", "a third text of the caller's own"), [], [], 1))
    assert ("undeclared", "exact") in modes(found)
    assert found.planned is not Outcome.SPLICED


def test_other_tools_are_exact_whatever_is_mapped() -> None:
    """A change of tool definitions is no author's text, and no template's doing."""
    before = prepare(talk("user", "text"), [], [], 0)
    changed = talk("user", "another text that was changed")
    every = dict.fromkeys(("tool", "user", "assistant", "system", "template"), "amortize")
    found = plan(before, prepare(changed, [], [], 1), every, context="other tools")
    assert ("tools", "exact") in modes(found)
    assert found.planned is not Outcome.SPLICED


@pytest.mark.parametrize("mode", [Mode.AMORTIZE, Mode.FORGET])
def test_a_declaration_covers_its_own_message_only(mode: Mode) -> None:
    """Declared changes have their mode, the neighbour's undeclared one is exact."""
    before = talk("user", "the declared one is here")
    before.insert(2, {"role": "assistant", "content": "and the other one is here"})
    after = [dict(message) for message in before]
    after[1]["content"] = "the declared one was changed"
    edits = [DeclaredEdit(message=1, mode=mode)]
    sources = prepare(before, [], [], 0)
    alone = plan(sources, prepare(after, [], edits, 1))
    assert modes(alone) == {("declared", mode.value)}
    after[2]["content"] = "and the other one was changed too"
    both = plan(sources, prepare(after, [], edits, 1))
    assert modes(both) == {("declared", mode.value), ("undeclared", "exact")}


def test_a_removed_and_an_inserted_message_have_each_its_role() -> None:
    """If a tool's text made place for a user's, both must be mapped."""
    before = talk("function", "what the function returned")
    after = talk("user", "what the user said in its place")
    sources, turn = prepare(before, [], [], 0), prepare(after, [], [], 1)
    assert plan(sources, turn, {"tool": "amortize"}).planned is not Outcome.SPLICED
    assert plan(sources, turn, {"user": "amortize"}).planned is not Outcome.SPLICED
    both = {"tool": "amortize", "user": "amortize"}
    assert plan(sources, turn, both).planned is Outcome.SPLICED


def test_a_plan_names_no_text() -> None:
    """Edit records hold roles, names and numbers."""
    before = prepare(talk("user", "canary-before"), [], [], 0)
    found = plan(before, prepare(talk("user", "canary-after"), [], [], 1), {"user": "amortize"})
    assert "canary" not in repr(replace(found, directives=()))


def test_a_misplaced_content_lends_no_licence() -> None:
    """A user's change isn't taken for a part of the tool result before it."""

    def conversation(result: str, question: str) -> list[Message]:
        return [
            {"role": "system", "content": "<x>a system prompt longer than the sink is wide</x>"},
            {"role": "function", "content": result},
            {"role": "user", "name": "unseen", "content": "sure"},
            {"role": "user", "content": question},
            {"role": "assistant", "content": f"sure, {BEHIND}"},
        ]

    before = conversation("a long result of the function", "what is the first question")
    after = conversation("a result", "WHICH is the first question")
    found = plan(
        prepare(before, [], [], 0),
        prepare(after, [], [], 1),
        {"tool": "amortize"},
        template=looking,
    )
    assert found.planned is not Outcome.SPLICED
