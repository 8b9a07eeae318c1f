"""Loops of tool calls whose thinking the template strips when the user speaks again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from thinking_loops import (
    DEFAULT,
    EXACT,
    FINAL,
    begun,
    copied,
    played,
    result,
    served,
    settled,
    thought,
)

from leyline_engine.contract import Reason
from leyline_proxy.model.undeclared import UndeclaredRules

STRIPPING = ("GLM-4.6", "Qwen-Qwen3-0.6B", "deepseek-ai-DeepSeek-V3.2", "openai-gpt-oss-120b")
"""Templates that show thinking until the user speaks again."""
NEVER_SHOWING = (
    "Kimi-K2-Instruct",
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen3-Coder",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-V3.1",
    "meta-llama-Llama-3.1-8B-Instruct",
)
"""Templates that show no thinking of an earlier answer, so that nothing is stripped later."""
NO_CALLS = {"Kimi-K2-Instruct"}
"""Its template appends to a list, which no sandbox of Jinja allows."""
USER_TURNS = 3


@pytest.mark.parametrize("name", [*STRIPPING, *NEVER_SHOWING])
@pytest.mark.parametrize("calls", [20, pytest.param(100, marks=pytest.mark.nightly)])
def test_whatever_is_kept_is_reused_at_every_user_turn(
    name: str, calls: int, templates_dir: Path
) -> None:
    """Over loop after loop, only changed and new tokens are prefilled, and 1 % of the prompt."""
    loop = begun(templates_dir / f"{name}.jinja")
    number = 0
    for turn in range(1, USER_TURNS + 1):
        for _ in range(calls - 1):
            # Requests in the loop's middle leave nothing that its last ones don't leave.
            loop.messages += [thought(number, calls=name not in NO_CALLS), result(number)]
            number += 1
        loop.ask(thought(number, calls=name not in NO_CALLS))
        loop.messages.append(result(number))
        number += 1
        loop.ask(FINAL)
        loop.say(f"Now task {turn}.")
        held = list(loop.turns)
        plan, prompt = loop.ask(None)
        found = served(plan, prompt, held)
        assert found.beyond <= 0.01 and found.reused >= 0.99, (turn, found)
        causes = {(edit.cause, edit.mode) for edit in plan.edits}
        assert causes == ({("template", "amortize")} if name in STRIPPING else set())


@pytest.mark.parametrize("name", STRIPPING)
def test_all_but_the_thinking_is_kept_when_the_user_speaks(name: str, templates_dir: Path) -> None:
    """By default, nearly nothing of a loop is prefilled again; exact, nearly all of it is."""
    prefilled = {}
    for rules in (DEFAULT, EXACT):
        loop = played(templates_dir / f"{name}.jinja", rules, 8)
        loop.say("Now repair it.")
        plan, prompt = loop.ask(None)
        assert "Thought 7" not in loop.renderer.decode(prompt.tokens)
        assert {(edit.cause, edit.mode) for edit in plan.edits} == {("template", rules.reasoning)}
        prefilled[rules.reasoning] = len(prompt.tokens) - copied(plan)
        account = settled(plan, prompt)
        other = account.thinking if rules is EXACT else account.after_thinking
        assert other >= 0.8 * len(prompt.tokens)
        assert (account.thinking == 0) == (rules is DEFAULT)
    assert prefilled["amortize"] <= 0.01 * len(prompt.tokens) + 64
    assert prefilled["exact"] >= 0.8 * len(prompt.tokens)


def test_a_session_without_a_certain_name_is_exact(templates_dir: Path) -> None:
    """KV that remembers thinking isn't found by anybody who sends the same messages."""
    rules = replace(DEFAULT, trust="messages")
    loop = played(templates_dir / "Qwen-Qwen3-0.6B.jinja", rules, 3)
    loop.say("Now repair it.")
    plan, prompt = loop.ask(None)
    assert plan.reason is Reason.UNNAMED_SESSION
    assert {(edit.cause, edit.mode) for edit in plan.edits} == {("template", "exact")}
    assert settled(plan, prompt).thinking > 0


@pytest.mark.parametrize("said", ["exact", "amortize"])
def test_what_is_said_of_the_template_decides(said: str, templates_dir: Path) -> None:
    """An explicit mode of the template's edits is that of stripped thinking, too."""
    reasoning = {"exact": "amortize", "amortize": "exact"}[said]
    rules = replace(UndeclaredRules.parse({"template": said}), reasoning=reasoning)
    loop = played(templates_dir / "Qwen-Qwen3-0.6B.jinja", rules, 3)
    loop.say("Now repair it.")
    plan, _ = loop.ask(None)
    assert {(edit.cause, edit.mode) for edit in plan.edits} == {("template", said)}
