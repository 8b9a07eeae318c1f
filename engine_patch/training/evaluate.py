"""How often a model's answers are right, by kind of question, session length and distance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from training.encoding import Answer, Batch, Encoder, collate
from training.model import hidden_states
from training.task import Mix, session

LENGTHS = (256, 512, 1024, 2048, 4096)
"""Tokens of the sessions evaluated, and the upper ends of the classes of distance."""


def kind(answer: Answer) -> str:
    """What it takes to answer.

    ``recall`` of a value in sight, ``show`` of a name and value in sight, ``hidden`` for either of
    what only notes can tell, ``lookup`` of what isn't known.
    """
    question = answer.question
    if not question.known:
        return "lookup"
    if question.hidden:
        return "hidden"
    return "show" if question.shown else "recall"


@dataclass(slots=True)
class Tally:
    """Right answers and all answers, by kind."""

    right: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)

    def count(self, key: str, right: bool) -> None:
        """One more answer."""
        self.asked[key] += 1
        self.right[key] += right

    def rates(self) -> dict[str, float]:
        """Share of right answers by kind, in alphabetical order."""
        return {key: round(self.right[key] / self.asked[key], 4) for key in sorted(self.asked)}


def judged(batch: Batch, choices: torch.Tensor) -> Iterator[tuple[Answer, bool]]:
    """The answers, and whether each is right in every token, the closing one included.

    Args:
        batch: rows with their answers.
        choices: [B, T] int64, what the model would have said at each token.
    """
    same = (choices == batch.ids).tolist()
    for matches, row in zip(same, batch.rows, strict=True):
        for answer in row.answers:
            yield answer, all(matches[answer.start : answer.end])


@torch.inference_mode()
def evaluate(
    model: Any, tokenizer: Any, mix: Mix, *, seed: int, tokens: int = 65_536
) -> dict[str, dict[str, dict[str, float]]]:
    """Rates of right answers over sessions that training didn't see.

    Answers are teacher-forced: every token is judged after the right ones before it, so a rate
    is that of greedy answers that are right as a whole.

    Args:
        model: a DeepSeek-V2 causal LM in eval mode.
        tokenizer: its fast tokenizer.
        mix: what happens in the sessions.
        seed: of the sessions.
        tokens: of the sessions of each length, about.

    Returns:
        ``length`` and ``distance`` (tokens from the turn that showed the value, upper end of the
        class), each with rates by kind.
    """
    encoder = Encoder(tokenizer.backend_tokenizer)
    rng = Random(f"evaluation-{seed}")
    by_length = {length: Tally() for length in LENGTHS}
    by_distance = {length: Tally() for length in LENGTHS}
    for length, tally in by_length.items():
        for _ in range(max(1, tokens // length)):
            row = encoder.row(session(rng, mix), length)
            batch = collate([row], length, pad=tokenizer.pad_token_id)
            for answer, right in judged(batch, _choices(model, batch)):
                tally.count(kind(answer), right)
                if answer.question.known:
                    nearest = next(end for end in LENGTHS if answer.distance <= end)
                    by_distance[nearest].count(kind(answer), right)
    return {
        "length": {str(length): tally.rates() for length, tally in by_length.items()},
        "distance": {str(length): tally.rates() for length, tally in by_distance.items()},
    }


def _choices(model: Any, batch: Batch) -> torch.Tensor:
    hidden = hidden_states(model, batch.ids, batch.positions, batch.mask)[:, :-1]
    learnt = batch.learnt[:, 1:]
    choices = torch.full_like(batch.ids, -1)
    choices[:, 1:][learnt] = model.lm_head(hidden[learnt]).argmax(-1)
    return choices
