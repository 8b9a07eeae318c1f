"""Encode sessions as rows of tokens, with masks, positions, and the tokens to learn."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from leyline_lab.fidelity.recall_task import (
    TOOLS,
    Hidden,
    Message,
    Question,
    Sight,
    Thought,
    Turn,
)

_TOOL_LIST: Final = (
    "# Tools\n\nCall a function by writing one block per call:\n"
    '<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call>\n\n<tools>\n'
    + "".join(json.dumps(tool) + "\n" for tool in TOOLS)
    + "</tools>"
)
Ints = NDArray[np.int64]


def render(message: Message, *, tools: bool = False) -> str:
    """Render a message as the models' chat templates do, with its thought.

    Args:
        tools: True to list the tools in it, as in a system message.
    """
    thought = str(message.thought or "")
    return f"{_header(message)}{thought}{_body(message, tools=tools)}<|im_end|>\n"


def _header(message: Message) -> str:
    return f"<|im_start|>{message.role}\n"


def _body(message: Message, *, tools: bool) -> str:
    if message.call is not None:
        name, arguments = message.call
        call = f'{{"name": "{name}", "arguments": {json.dumps(arguments)}}}'
        return f"<tool_call>\n{call}\n</tool_call>"
    return f"{message.content}\n\n{_TOOL_LIST}" if tools else message.content


@dataclass(frozen=True, slots=True)
class Answer:
    """Place of the answer to a question of a row."""

    question: Question
    start: int
    """Index of the answer's first token; the one before it predicts it."""
    end: int
    """Index after the closing ``<|im_end|>``."""
    distance: int
    """Tokens from the turn that showed the value to the answer; -1 if it must be looked up."""


@dataclass(frozen=True, slots=True)
class Row:
    """One session as tokens, cut at a turn; all arrays have the row's length."""

    ids: Ints
    positions: Ints
    blind: Ints
    """Shape [2, length]: token j isn't seen by tokens i with ``blind[0, j] <= i < blind[1, j]``."""
    learnt: NDArray[np.bool_]
    """True for tokens that the assistant says."""
    answers: tuple[Answer, ...]


class Encoder:
    """Tokenises sessions; repeated pieces of text are tokenised once."""

    def __init__(self, tokenizer: Any) -> None:
        """Take a ``tokenizers.Tokenizer`` with the chat template's special tokens."""
        self._tokenizer = tokenizer
        self._memo: dict[str, list[int]] = {}

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        if (known := self._memo.get(text)) is None:
            known = self._tokenizer.encode(text, add_special_tokens=False).ids
            if len(self._memo) < 200_000:
                self._memo[text] = known
        return known

    def row(
        self, turns: Iterable[Turn], length: int, *, tools: bool = False, gaps: Random | None = None
    ) -> Row:
        """Return a row of as many turns as fit into ``length`` tokens.

        Args:
            turns: consumed until one doesn't fit.
            length: maximum number of tokens.
            tools: True if a system message lists the tools.
            gaps: generator of jumps ahead in the positions, at some messages; None for no jumps.
        """
        builder = _Builder(self, length, tools, gaps)
        for turn in turns:
            if not builder.add(turn):
                break
        return builder.build()


class _Builder:
    def __init__(self, encoder: Encoder, length: int, tools: bool, gaps: Random | None) -> None:
        self._encoder = encoder
        self._length = length
        self._tools = tools
        self._gaps = gaps
        self._gap_share = gaps.choice((0.02, 0.05, 0.2)) if gaps else 0.0
        self._ids: list[int] = []
        self._positions: list[int] = []
        self._next = 0
        """Position of the next token."""
        self._blind: list[tuple[int, int]] = []
        self._learnt: list[bool] = []
        self._answers: list[Answer] = []
        self._turn_starts: list[int] = []
        self._hidden: list[tuple[int, int, int, int]] = []
        """Last turn that sees the content, start of the stub, start and end of the content."""

    def add(self, turn: Turn) -> bool:
        """Add a turn; change nothing if it is too long."""
        start = len(self._ids)
        counts = len(self._answers), len(self._hidden)
        self._turn_starts.append(start)
        for message in turn:
            self._message(message)
        if len(self._ids) <= self._length:
            return True
        for column in (self._ids, self._positions, self._blind, self._learnt):
            del column[start:]
        del self._answers[counts[0] :], self._hidden[counts[1] :]
        self._turn_starts.pop()
        return False

    def _message(self, message: Message) -> None:
        ids = self._encoder.ids
        if self._gaps and self._gaps.random() < self._gap_share:
            self._next += self._gaps.randint(1, 200)
        self._put(ids(_header(message)))
        body = ids(_body(message, tools=self._tools and message.role == "system"))
        if message.hidden is not None:
            self._stub(message.hidden, len(body))
        learnt = message.role == "assistant"
        if message.thought is not None:
            learnt = message.thought.sight is not Sight.NEVER
            if learnt:
                self._think(message.thought)
        start = len(self._ids)
        self._put(body, learnt=learnt)
        self._put(ids("<|im_end|>"), learnt=learnt)
        if (question := message.question) is not None:
            seen = question.source >= 0
            distance = start - self._turn_starts[question.source] if seen else -1
            self._answers.append(Answer(question, start, len(self._ids), distance))
        self._put(ids("\n"))

    def _think(self, thought: Thought) -> None:
        """Add a thought; if it is stripped, later turns don't see it, and have no stub for it."""
        start = len(self._ids)
        self._put(self._encoder.ids(str(thought)), learnt=True)
        if thought.sight is Sight.STRIPPED:
            self._hidden.append((len(self._turn_starts) - 1, start, start, len(self._ids)))

    def _stub(self, hidden: Hidden, content: int) -> None:
        """Add the stub that later turns see in place of the content, at its first positions."""
        start, position = len(self._ids), self._next
        self._put(self._encoder.ids(hidden.stub))
        self._next = position
        middle = len(self._ids)
        last_turn = len(self._turn_starts) - 1 + hidden.after
        self._hidden.append((last_turn, start, middle, middle + content))

    def _put(self, ids: Sequence[int], *, learnt: bool = False) -> None:
        self._ids += ids
        self._positions += range(self._next, self._next + len(ids))
        self._next += len(ids)
        self._blind += [(0, 0)] * len(ids)
        self._learnt += [learnt] * len(ids)

    def build(self) -> Row:
        """Return the row; nothing may be added afterwards."""
        size = len(self._ids)
        blind = np.array(self._blind, dtype=np.int64).reshape(size, 2).T.copy()
        for last_turn, stub, content, end in self._hidden:
            after = last_turn + 1
            horizon = self._turn_starts[after] if after < len(self._turn_starts) else size
            blind[:, stub:content] = [[content], [horizon]]
            blind[:, content:end] = [[horizon], [size]]
        return Row(
            np.array(self._ids, dtype=np.int64),
            np.array(self._positions, dtype=np.int64),
            blind,
            np.array(self._learnt, dtype=np.bool_),
            tuple(self._answers),
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows padded to one length T."""

    ids: torch.Tensor
    """[B, T], int64."""
    positions: torch.Tensor
    """[B, T], int64."""
    mask: torch.Tensor | None
    """[B, 1, T, T], bool, True if token i sees token j; None for a causal mask."""
    learnt: torch.Tensor
    """[B, T], bool."""
    real: torch.Tensor
    """[B, T], bool, False for padding."""
    rows: tuple[Row, ...]


def collate(rows: Sequence[Row], length: int, *, pad: int) -> Batch:
    """Return rows of at most ``length`` tokens as one batch."""
    size = len(rows)
    ids = np.full((size, length), pad, dtype=np.int64)
    positions = np.zeros((size, length), dtype=np.int64)
    learnt = np.zeros((size, length), dtype=np.bool_)
    real = np.zeros((size, length), dtype=np.bool_)
    blind = np.zeros((size, 2, length), dtype=np.int64)
    for index, row in enumerate(rows):
        count = len(row.ids)
        ids[index, :count] = row.ids
        positions[index, :count] = row.positions
        learnt[index, :count] = row.learnt
        real[index, :count] = True
        blind[index, :, :count] = row.blind
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(positions),
        _mask(torch.from_numpy(blind)) if blind.any() else None,
        torch.from_numpy(learnt),
        torch.from_numpy(real),
        tuple(rows),
    )


def _mask(blind: torch.Tensor) -> torch.Tensor:
    """Return [B, 2, T] intervals of unseen tokens as a mask [B, 1, T, T] of seen ones."""
    length = blind.shape[-1]
    reader = torch.arange(length)[:, None]
    causal = reader >= torch.arange(length)
    unseen = (reader >= blind[:, 0, None]) & (reader < blind[:, 1, None])
    return (causal & ~unseen)[:, None]
