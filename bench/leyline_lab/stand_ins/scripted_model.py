"""A model that speaks a script's lines inside the real engine.

Only the logits are scripted. Prompts are prefilled, answers are decoded token by token, cached,
parsed for tool calls and accounted for as any model's, so that usage, receipts and cached tokens
mean what they say. The window is long enough for the system prompts of coding agents.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, repeat, takewhile
from pathlib import Path
from typing import Any

import torch
from starlette.applications import Starlette

from leyline_engine.contract import Receipt
from leyline_replay.factory import create_engine_app
from leyline_replay.models.tiny_chat_template import TOOL_CALL_CLOSE, TOOL_CALL_OPEN

from .random_models import RandomKind, build_random
from .serving import check_clean, engine_tokenizer

SCRIPTED = "scripted"
"""The name that the model is served under."""
WINDOW = 262_144
_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": WINDOW,
}
"""A prompt of 30,000 tokens is prefilled in a few seconds on one core."""
_CERTAIN = 50.0
_MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", re.DOTALL)
_TOOLS = re.compile(r".*\n<tools>\n(.*)\n</tools>$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call to make."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """The model's reply: a text, tool calls, or both."""

    text: str = ""
    calls: tuple[Call, ...] = ()

    @property
    def spelled(self) -> str:
        """Render the reply as the chat template would, so that the next prompt begins with it."""
        blocks = [
            f'{TOOL_CALL_OPEN}\n{{"name": {json.dumps(call.name)}, "arguments": '
            f"{json.dumps(call.arguments, ensure_ascii=False)}}}\n"
            f"{TOOL_CALL_CLOSE}"
            for call in self.calls
        ]
        return "\n".join((*([self.text] if self.text else ()), *blocks))


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt that the model was given, split into messages again."""

    messages: tuple[tuple[str, str], ...]
    """Role and text."""
    tools: frozenset[str]
    """Names of the tools that may be called."""

    @classmethod
    def of(cls, text: str) -> Prompt:
        """Return the prompt that the tiny models' chat template rendered."""
        messages = tuple((match[1], match[2]) for match in _MESSAGE.finditer(text))
        listed = _TOOLS.search(messages[0][1]) if messages else None
        lines = listed[1].splitlines() if listed else ()
        return cls(messages, frozenset(json.loads(line)["function"]["name"] for line in lines))

    def said_since(self, task: str, replies: Sequence[Reply]) -> int | None:
        """Count the ``replies`` that follow the first user message that holds ``task``, if any.

        Clients put words of their own into the model's mouth, too; those don't count.
        """
        texts = [reply.text for reply in replies if reply.text]
        for index, (role, text) in enumerate(self.messages):
            if role == "user" and task in text:
                answers = (text for role, text in self.messages[index:] if role == "assistant")
                return sum(
                    TOOL_CALL_OPEN in answer or any(text in answer for text in texts)
                    for answer in answers
                )
        return None


Script = Callable[[Prompt], tuple[Reply, bool]]
"""Returns the answer to a prompt, and True if it is a step of the session that is followed."""


def follow(task: str, *replies: Reply, aside: str = "A session.") -> Script:
    """Answer requests that hold ``task`` with ``replies`` in turn, and all others with ``aside``.

    How far the session has come is read from the answers in the prompt, so that nothing depends on
    a client's own wording. Requests that don't offer the tools of the next reply (they ask for a
    title, or a summary) are answered with ``aside``.
    """

    known = {call.name for reply in replies for call in reply.calls}

    def script(prompt: Prompt) -> tuple[Reply, bool]:
        done = prompt.said_since(task, replies)
        if done is None or done >= len(replies):
            return Reply(aside), False
        next_calls = {call.name for call in replies[done].calls}
        # A closing text calls nothing, but comes where the session's tools are offered, too.
        if not next_calls <= prompt.tools or (known and not known & prompt.tools):
            return Reply(aside), False
        return replies[done], True

    return script


def follow_marks(task: str, mark: str, *replies: Reply) -> Script:
    """Answer requests whose last user message holds ``task`` with ``replies`` in turn.

    Serves clients that write the session into that message: how far it has come is the number of
    ``mark`` in it.
    """

    def script(prompt: Prompt) -> tuple[Reply, bool]:
        text = next((text for role, text in reversed(prompt.messages) if role == "user"), "")
        return replies[text.count(mark)], task in text

    return script


@dataclass(frozen=True, slots=True)
class ModelTurn:
    """One request as the engine ran it."""

    prompt: array[int]
    receipt: Receipt
    kept: Sequence[int]
    """The generated tokens without the last one: nothing was computed of that."""
    followed: bool
    """True if it is a step of the session that is followed."""

    @property
    def cached(self) -> int:
        """Return the prompt tokens that weren't prefilled."""
        return self.receipt.tokens.served

    def shares(self, earlier: ModelTurn) -> int:
        """Count the first tokens that are those of an earlier prompt with its answer."""
        pairs = zip(self.prompt, chain(earlier.prompt, earlier.kept), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@dataclass(slots=True)
class ScriptedModel:
    """The engine's application, and the requests that it has run, in order."""

    app: Starlette
    admitted: list[tuple[array[int], str, bool]] = field(default_factory=list)
    """Prompt, name, and True if it is a step of the session that is followed."""

    def turns(self) -> list[ModelTurn]:
        """Return the outcomes of the requests that have ended."""
        book = self.app.state.service.records
        found = [(prompt, book.get(name), step) for prompt, name, step in self.admitted]
        return [
            ModelTurn(prompt, record.receipt, record.output_ids[:-1], step)
            for prompt, record, step in found
            if record is not None
        ]


def build_scripted(directory: Path) -> Path:
    """Write the model's files."""
    return build_random(RandomKind.LLAMA, directory, **_SMALL)


@contextmanager
def scripted_model(files: Path, script: Script) -> Iterator[ScriptedModel]:
    """Run an engine with an empty cache whose model follows ``script``.

    Args:
        files: by :func:`build_scripted`.
    """
    app = create_engine_app(
        model=str(files),
        served_name=SCRIPTED,
        device="cpu",
        pool_tokens=WINDOW,
        chunk_tokens=2048,
    )
    model = ScriptedModel(app)
    _install(model, script)
    try:
        yield model
        check_clean(app)
    finally:
        app.state.shutdown()


def _install(model: ScriptedModel, script: Script) -> None:
    """Put the script between the model's forward and the sampling of its logits."""
    engine = model.app.state.service._engine
    tokenizer = engine_tokenizer(model.app)
    end = int(tokenizer.eos_token_id)
    original = engine.admit

    def admit(request: Any) -> Any:
        sequence = original(request)
        text = tokenizer.decode(request.tokens.tolist(), skip_special_tokens=False)
        reply, followed = script(Prompt.of(text))
        spelled = chain(tokenizer(reply.spelled)["input_ids"], repeat(end))
        model.admitted.append((request.tokens, request.request_id, followed))
        sequence.forward = _spelling(sequence.forward, spelled, sequence)
        return sequence

    engine.admit = admit


def _spelling(forward: Any, script: Iterator[int], sequence: Any) -> Any:
    """Return a forward whose logits spell ``script``, from the prompt's last position on."""

    def spelled(tokens: list[int], start: int, cache: Any) -> torch.Tensor:
        logits: torch.Tensor = forward(tokens, start, cache)
        if start + len(tokens) < len(sequence.prompt):
            return logits
        wanted = torch.zeros_like(logits)
        wanted[next(script)] = _CERTAIN
        return wanted

    return spelled
