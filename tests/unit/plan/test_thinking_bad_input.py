"""Thinking that the client rewrites, and templates that strip at other times than most."""

from __future__ import annotations

from pathlib import Path

import pytest
from thinking_loops import DEFAULT, FINAL, begun, copied, played, result, served, thought

from leyline_engine.contract import CopySegment

SHOWING = ("GLM-4.6", "Qwen-Qwen3-0.6B", "deepseek-ai-DeepSeek-V3.2", "openai-gpt-oss-120b")
PLACE = 2 + 2 * 3
"""Index of the fourth call's message."""
OTHER = "Another thought. " * 40


@pytest.mark.parametrize("name", SHOWING)
@pytest.mark.parametrize("words", [OTHER, ""])
def test_thinking_that_the_client_rewrites_is_its_own_edit(
    name: str, words: str, templates_dir: Path
) -> None:
    """In a loop, changed or omitted thinking is undeclared, and what had read it isn't moved."""
    loop = begun(templates_dir / f"{name}.jinja")
    for number in range(4):
        loop.ask(thought(number))
        loop.messages.append(result(number))
    before = loop.renderer.render(loop.messages, None, template_kwargs=loop.options)
    loop.messages[4] = {**loop.messages[4], "reasoning_content": words, "thinking": words}
    after = loop.renderer.render(loop.messages, None, template_kwargs=loop.options)
    assert before.tokens != after.tokens
    held = list(loop.turns)
    plan, prompt = loop.ask(thought(4))
    assert "undeclared" in {edit.cause for edit in plan.edits}
    assert {edit.mode for edit in plan.edits} == {"exact"}
    # Without a copy after the edit, the engine finds the prefix by itself.
    assert not plan.segments and served(plan, prompt, held).prefilled > 0.5 * len(prompt.tokens)


@pytest.mark.parametrize("name", SHOWING)
def test_rewritten_thinking_that_the_template_strips_is_exact_from_there(
    name: str, templates_dir: Path
) -> None:
    """If the client changes a message as the user speaks, what had read it isn't moved, not even
    from a turn that was asked before the client sent it."""
    loop = played(templates_dir / f"{name}.jinja", DEFAULT, 6)
    changed = {"reasoning_content": OTHER, "thinking": OTHER}
    loop.messages[PLACE] = {**loop.messages[PLACE], **changed}
    loop.say("Now repair it.")
    plan, prompt = loop.ask(None)
    assert ("undeclared", "exact") in {(edit.cause, edit.mode) for edit in plan.edits}
    last = [segment for segment in plan.segments if isinstance(segment, CopySegment)][-1]
    text = loop.renderer.decode(prompt.tokens[: last.dest_end])
    assert "2.79 =" in text and "file3.py" not in text


def test_a_template_that_strips_at_once_is_spliced_at_the_next_step(templates_dir: Path) -> None:
    """DeepSeek-V3.1 shows no thinking even in a loop: what follows it moves, and nothing else."""
    loop = begun(templates_dir / "deepseek-ai-DeepSeek-V3.1.jinja")
    for turn in range(3):
        for number in range(2):
            call = thought(2 * turn + number)
            call["content"] = "I look for the file that has it, and read it: " * 4
            words = call["reasoning_content"]
            # Only after the user's message does the prompt open a block of thinking.
            shown = loop.renderer.encode(call["content"])
            written = f"{words}</think>{call['content']}" if number == 0 else None
            held = list(loop.turns)
            plan, prompt = loop.ask(call, written)
            if number == 1:
                assert words not in loop.renderer.decode(prompt.tokens)
                assert {(e.cause, e.mode) for e in plan.edits} == {("template", "amortize")}
                assert copied(plan) >= len(held[-1].rendered.tokens) + len(shown) - 8
            loop.messages.append(result(2 * turn + number))
        loop.ask(FINAL)
        held = list(loop.turns)
        loop.say(f"Now task {turn}.")
        plan, prompt = loop.ask(None)
        found = served(plan, prompt, held)
        assert found.beyond <= 0.01 and found.reused >= 0.99


def test_harmony_keeps_its_analysis_until_there_is_a_final_answer(templates_dir: Path) -> None:
    """gpt-oss strips nothing if the user speaks into a loop, and all of it once it has answered."""
    loop = begun(templates_dir / "openai-gpt-oss-120b.jinja")
    for number in range(6):
        loop.ask(thought(number))
        loop.messages.append(result(number))
    loop.say("Faster, please.")
    held = list(loop.turns)
    plan, prompt = loop.ask(thought(6))
    assert "Thought 3" in loop.renderer.decode(prompt.tokens)
    assert not plan.edits and served(plan, prompt, held).beyond <= 0
    loop.messages.append(result(6))
    loop.ask(FINAL)
    loop.say("Now repair it.")
    held = list(loop.turns)
    plan, prompt = loop.ask(None)
    assert "Thought 3" not in loop.renderer.decode(prompt.tokens)
    assert {(edit.cause, edit.mode) for edit in plan.edits} == {("template", "amortize")}
    found = served(plan, prompt, held)
    assert found.beyond <= 0.01 and found.reused >= 0.99
