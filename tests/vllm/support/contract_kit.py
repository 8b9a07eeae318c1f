"""Turns of an engine of this process beside the amortize contract computed the long way round.

The engine chooses the tokens; the reference, plain transformers in fp32, is led along them. What is
compared are log-probabilities of decoded tokens, and the pool's rows of the whole turn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from oracle_models import OracleModel
from oracle_reference import Fresh, Keep, LongWay, Piece, Remembered, long_way_round, placed
from splice_kit import Answer, SplicingEngine
from transformers import AutoModelForCausalLM

from leyline_engine.contract import (
    CopySegment,
    Directive,
    EditPayload,
    Receipt,
    Segment,
    SpanLabel,
    apply_directives,
    lower_directives,
)

BOUND = 1e-4
"""Largest |Δ log-probability| allowed, as a share of the largest |logit|."""
CONTROL_FACTOR = 100
"""A wrong splice must be off by so many times the bound."""
ROWS_BOUND = 1e-5
"""Largest difference of a pool row, as a share of the largest element of its layer."""
BLOCK, MIN_COPY, STAGE_COST, SINK = 32, 32, 64, 32
"""The engine's defaults; literals on purpose."""
TOKENS = range(64, 4096)
_SCORED = 20
_turns = count(1)


def load_reference(folder: Path) -> OracleModel:
    """The model in ``folder`` as plain transformers runs it, fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return OracleModel(folder.name, model.requires_grad_(requires_grad=False))


def draw_tokens(rng: random.Random, length: int) -> tuple[int, ...]:
    """Random ordinary tokens."""
    return tuple(rng.choices(TOKENS, k=length))


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """One turn as both sides have it."""

    name: str
    answer: Answer
    receipt: Receipt
    pieces: tuple[Piece, ...]
    """The parts of which the contract makes the prompt."""
    expected: LongWay
    rows: tuple[list[torch.Tensor], list[torch.Tensor]]
    """Keys and values of the pool, for all tokens but the last."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and output."""
        return self.answer.tokens

    @property
    def truth(self) -> Remembered:
        """The turn as the reference remembers it."""
        return self.expected.turn

    @property
    def error(self) -> float:
        """Largest |Δ log-probability|, as a share of the largest |logit| at its position."""
        return distance(self.answer, self.expected)


@dataclass(eq=False)
class PlayedSession:
    """One session against an engine, and its reference."""

    engine: SplicingEngine
    subject: OracleModel
    session: str = "s"
    scope: str = "tenant"
    decode: int = 12
    turns: list[Played] = field(default_factory=list)

    def open(self, prompt: Sequence[int], **members: Any) -> Played:
        """A turn without edits."""
        return self._run(prompt, [Fresh(tuple(prompt))], **members)

    def edit(
        self, source: Played, directives: Sequence[Directive], tail: Sequence[int], **members: Any
    ) -> Played:
        """An earlier turn, edited by directives, and a tail."""
        prompt = (*apply_directives(source.tokens, directives), *tail)
        segments = lower_directives(directives, len(source.tokens), len(prompt))
        return self.compose([source], segments, prompt, directives=tuple(directives), **members)

    def compose(
        self,
        sources: Sequence[Played],
        segments: Sequence[Segment],
        prompt: Sequence[int],
        **members: Any,
    ) -> Played:
        """A prompt of pieces of earlier turns; the first segment copies the first one's start."""
        pieces = contracted(prompt, [turn.truth for turn in sources], segments)
        prefix = segments[0].dest_end if isinstance(segments[0], CopySegment) else 0
        members.setdefault("segments", tuple(segments))
        members["lineage"] = tuple(r for r in sources[0].receipt.lineage if r.start < prefix)
        members["sources"] = tuple(turn.answer.ref(turn.name) for turn in sources)
        return self._run(prompt, pieces, **members)

    def _run(self, prompt: Sequence[int], pieces: Sequence[Piece], **members: Any) -> Played:
        name = f"t{next(_turns)}"
        payload = EditPayload(session=self.session, scope=self.scope, turn=name, **members)
        answer, rows = self.engine.ask_for_rows(prompt, payload, decode=self.decode, scores=_SCORED)
        assert answer.record is not None
        expected = expect(self.subject, pieces, answer)
        played = Played(name, answer, answer.record.receipt, tuple(pieces), expected, rows)
        self.turns.append(played)
        return played


def contracted(
    prompt: Sequence[int], sources: Sequence[Remembered], segments: Sequence[Segment]
) -> list[Piece]:
    """The contract's version of segments: what is kept of them, and what is computed again.

    Whole blocks of the first segment are the cached prefix; rows of full blocks can be copied.
    """
    last = len(prompt) - 1
    copies: list[tuple[int, int, int, int]] = []
    prefix = 0
    for segment in segments:
        if not isinstance(segment, CopySegment):
            continue
        cached = len(sources[segment.source].tokens[:-1]) // BLOCK * BLOCK
        end = min(segment.end, cached, segment.start + last - segment.dest)
        begin = segment.start
        if segment.dest == 0 and segment.start == 0 and segment.source == 0:
            prefix = begin = max(0, end) // BLOCK * BLOCK
        dest = segment.dest + begin - segment.start
        skip = max(0, SINK - dest)
        if end - begin - skip > 0:
            copies.append((segment.source, begin + skip, end, dest + skip))
    kept: list[Piece] = []
    if prefix:
        kept.append(Keep(sources[0], 0, prefix))
    at = prefix
    for run in _runs(copies):
        length = sum(end - start for _, start, end, _ in run)
        dest = run[0][3]
        if length < MIN_COPY or (dest > prefix and length < STAGE_COST):
            continue
        if dest > at:
            kept.append(Fresh(tuple(prompt[at:dest])))
        for source, start, end, where in run:
            kept.append(Keep(sources[source], start, end))
            at = where + end - start
    return [*kept, Fresh(tuple(prompt[at:]))]


def _runs(copies: Sequence[tuple[int, int, int, int]]) -> list[list[tuple[int, int, int, int]]]:
    runs: list[list[tuple[int, int, int, int]]] = []
    for copy in copies:
        last = runs[-1][-1] if runs else None
        if last is not None and last[3] + last[2] - last[1] == copy[3]:
            runs[-1].append(copy)
        else:
            runs.append([copy])
    return runs


def piece_length(piece: Piece) -> int:
    """Tokens of a piece."""
    return piece.end - piece.start if isinstance(piece, Keep) else len(piece.tokens)


def kept_after_prefix(pieces: Sequence[Piece]) -> int:
    """Kept tokens after the prefix."""
    begins = isinstance(pieces[0], Keep) and pieces[0].start == 0 and pieces[0].end % BLOCK == 0
    kept = [piece_length(piece) for piece in pieces if isinstance(piece, Keep)]
    return sum(kept[1:] if begins else kept)


def expect(subject: OracleModel, pieces: Sequence[Piece], answer: Answer) -> LongWay:
    """The reference's logits of the last prompt token and of each decoded one."""
    assert isinstance(pieces[-1], Fresh)
    return long_way_round(subject, list(pieces), answer.output[:-1], answer.output[-1])


def distance(answer: Answer, expected: LongWay) -> float:
    """Largest |Δ log-probability|, as a share of the reference's largest |logit| there."""
    assert len(answer.scores) == len(expected.logits)
    worst = 0.0
    for scores, logits in zip(answer.scores, expected.logits, strict=True):
        right = logits.double().log_softmax(-1)
        error = max(abs(score - float(right[token])) for token, score in scores.items())
        worst = max(worst, error / float(logits.abs().max()))
    return worst


def row_errors(subject: OracleModel, played: Played) -> tuple[float, float]:
    """The distance of a turn's keys and values from the reference's, as shares of the largest
    element of their layer."""
    keys, values = played.rows
    right_keys, right_values = placed(subject, played.truth)
    return _share(keys, right_keys), _share(values, right_values)


def _share(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    return max(
        float((a.reshape(b.shape) - b).abs().max() / b.abs().max())
        for a, b in zip(got, expected, strict=True)
    )


def labels(*ends: tuple[str, int]) -> tuple[SpanLabel, ...]:
    """Labels of parts that follow one another; each with its end."""
    found, start = [], 0
    for name, end in ends:
        found.append(SpanLabel(name, start, end))
        start = end
    return tuple(found)
