"""Answers compared with those of the references: agreement, and the distance of logits."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import torch

from leyline_engine.contract import common_prefix
from leyline_engine.fidelity.experiment import Cell
from leyline_engine.fidelity.subject import Answer
from leyline_engine.fidelity.tool_names import called_tool

FULL = "full"
REPREFILL = "re-prefill"
SPLICE = "splice"
ASKED = "splice, asked before"
LATER = "splice, later"
NAIVE = "no rotation"
REFERENCES = (FULL, REPREFILL)
TOP = 10


def compare_all(answers: Mapping[str, Answer]) -> dict[str, Cell]:
    """Compare every arm with both references.

    Args:
        answers: by arm, the references among them.

    Returns:
        ``ARM|REFERENCE|MEASURE`` and its value; ``ARM|nearer|l2`` for the reference that is nearer;
        and ``differ``: 1 if the references begin differently.
    """
    full, again = (answers[name] for name in REFERENCES)
    record: dict[str, Cell] = {"differ": int(first_token(full) != first_token(again))}
    for arm, answer in answers.items():
        for name in REFERENCES:
            if arm not in (FULL, name):
                for measure, value in compare(answers[name], answer).items():
                    record[f"{arm}|{name}|{measure}"] = value
        if arm not in REFERENCES:
            record[f"{arm}|nearer|l2"] = min(
                float((answers[name].first.double() - answer.first.double()).norm())
                for name in REFERENCES
            )
    return record


def compare(reference: Answer, other: Answer) -> dict[str, Cell]:
    """Compare an answer with a reference.

    Returns:
        ``first`` and ``same``: 1 if the first token, or the whole answer, is equal; ``common``:
        number of equal tokens in front of the first difference; ``tool``: 1 if both call the same
        tool, None if either calls none; ``kl`` (nats) and ``l2`` of the first token's logits;
        ``top``: the share of the ten likeliest tokens that both have.
    """
    names = called_tool(reference.text), called_tool(other.text)
    return {
        "first": int(first_token(reference) == first_token(other)),
        "same": int(reference.tokens == other.tokens),
        "common": common_prefix(array("q", reference.tokens), array("q", other.tokens)),
        "tool": int(names[0] == names[1]) if all(names) else None,
        "kl": divergence(reference.first, other.first),
        "l2": float((reference.first.double() - other.first.double()).norm()),
        "top": top_overlap(reference.first, other.first),
    }


def first_token(answer: Answer) -> int:
    """Return the likeliest first token."""
    return int(answer.first.argmax())


def divergence(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Return the Kullback-Leibler divergence of the first token's distributions, in nats."""
    one, two = (logits.double().log_softmax(-1) for logits in (reference, other))
    # Rounding can leave a divergence of equal distributions just below zero.
    return max(0.0, float((one.exp() * (one - two)).sum()))


def top_overlap(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Return the share of the likeliest tokens that both have."""
    count = min(TOP, reference.numel())
    one, two = (set(logits.topk(count).indices.tolist()) for logits in (reference, other))
    return len(one & two) / count
