"""Rates of a model's right answers, by kind of question, session length and distance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from leyline_lab.fidelity.recall_task import Mix, session
from leyline_lab.training.encoding import (
    Answer,
    Batch,
    Encoder,
    collate,
)
from leyline_lab.training.model import hidden_states

LENGTHS = (256, 512, 1024, 2048, 4096)
"""Lengths of the evaluated sessions in tokens, and upper ends of the classes of distance."""


def kind(answer: Answer) -> str:
    """Return the kind of an answer.

    ``recall``: a visible value. ``show``: a visible name and value. ``hidden``: either of them, if
    only notes have it. ``lookup``: an unknown value. Of a value that the assistant chose as it
    thought, ``thought``: the thinking or an earlier answer is visible; ``stripped``: only the
    thought's own turn has read it; ``never``: nothing has, so the value is unknown.
    """
    question = answer.question
    if question.chosen:
        return "stripped" if question.hidden else "thought" if question.known else "never"
    if not question.known:
        return "lookup"
    if question.hidden:
        return "hidden"
    return "show" if question.shown else "recall"


@dataclass(slots=True)
class Tally:
    """Numbers of right answers and of all answers, by kind."""

    right: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)

    def count(self, key: str, right: bool) -> None:
        """Count an answer."""
        self.asked[key] += 1
        self.right[key] += right

    def rates(self) -> dict[str, float]:
        """Return the share of right answers by kind, in alphabetical order."""
        return {key: round(self.right[key] / self.asked[key], 4) for key in sorted(self.asked)}


def judged(batch: Batch, choices: torch.Tensor) -> Iterator[tuple[Answer, bool]]:
    """Yield the answers, with True for each that is right in every token, including the closing
    one.

    Args:
        batch: rows with their answers.
        choices: [B, T] int64, the model's own token at each place.
    """
    same = (choices == batch.ids).tolist()
    for matches, row in zip(same, batch.rows, strict=True):
        for answer in row.answers:
            yield answer, all(matches[answer.start : answer.end])


@torch.inference_mode()
def evaluate(
    model: Any, tokenizer: Any, mix: Mix, *, seed: int, tokens: int = 65_536
) -> dict[str, dict[str, dict[str, float]]]:
    """Return the rates of right answers over sessions that training didn't see.

    Answers are teacher-forced: every token is judged after the right ones before it, so a rate is
    that of entirely right greedy answers.

    Args:
        model: a DeepSeek-V2 causal LM in eval mode.
        tokenizer: its fast tokenizer.
        mix: frequencies of events in the sessions.
        seed: the sessions' seed.
        tokens: approximate total of the sessions of each length.

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
