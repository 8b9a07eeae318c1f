"""Answers compared with those of the references: agreement, and the distance of logits."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from math import log

import numpy as np
from numpy.typing import NDArray

from leyline_engine.contract import Directive, apply_directives, common_prefix
from leyline_lab.fidelity.experiment import Cell
from leyline_lab.fidelity.judges import called_tool
from leyline_lab.fidelity.subject import Answer, Subject

FULL = "full"
REPREFILL = "re-prefill"
SPLICE = "splice"
ASKED = "splice, asked before"
LATER = "splice, later"
NAIVE = "no rotation"
REFERENCES = (FULL, REPREFILL)
TOP = 10
_LEAST = 1e-9
"""Smallest probability of all tokens together that aren't reported: fp32 doesn't resolve less."""

Logits = NDArray[np.float32]


def control(
    subject: Subject, source: Sequence[int], edits: Sequence[Directive], then: Sequence[int] = ()
) -> dict[str, Answer]:
    """Return the control's answer by its arm; nothing if the subject has no control.

    Arguments are those of :meth:`~.subject.Subject.spliced`.
    """
    if not subject.has_control:
        return {}
    return {NAIVE: subject.spliced(source, edits, then, rotated=False)}


def edited_answers(
    subject: Subject, source: Sequence[int], edits: Sequence[Directive], then: Sequence[int] = ()
) -> dict[str, Answer]:
    """Return the answers over the whole prompt, over the edited one, spliced, and the control's.

    Arguments are those of :meth:`~.subject.Subject.spliced`.
    """
    return {
        FULL: subject.whole([*source, *then]),
        REPREFILL: subject.prefilled([*apply_directives(source, edits), *then]),
        SPLICE: subject.spliced(source, edits, then),
        **control(subject, source, edits, then),
    }


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
            apart = (record[f"{arm}|{name}|l2"] for name in REFERENCES)
            record[f"{arm}|nearer|l2"] = min(
                (each for each in apart if isinstance(each, float)), default=None
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
        "l2": distance(reference.first, other.first),
        "top": top_overlap(reference.first, other.first),
    }


def first_token(answer: Answer) -> int:
    """Return the likeliest first token."""
    return int(np.nanargmax(answer.first))


def distance(reference: Logits, other: Logits) -> float | None:
    """Return the Euclidean distance over the tokens that both report; None if there is none."""
    apart = reference.astype(np.float64) - other.astype(np.float64)
    both = apart[~np.isnan(apart)]
    return float(np.linalg.norm(both)) if both.size else None


def divergence(reference: Logits, other: Logits) -> float | None:
    """Return the Kullback-Leibler divergence of the first token's distributions, in nats.

    Tokens that one of them doesn't report count as a single one: that makes the divergence smaller,
    and never larger. None if they have none in common.
    """
    one, two = _log_probabilities(reference), _log_probabilities(other)
    both = ~np.isnan(one - two)
    if not both.any():
        return None
    sums = float((np.exp(one[both]) * (one[both] - two[both])).sum())
    if not both.all():
        rest, others = (max(_LEAST, 1.0 - float(np.exp(each[both]).sum())) for each in (one, two))
        sums += rest * log(rest / others)
    # Rounding can leave a divergence of equal distributions just below zero.
    return max(0.0, sums)


def top_overlap(reference: Logits, other: Logits) -> float:
    """Return the share of the likeliest tokens that both have."""
    count = min(TOP, *(int((~np.isnan(each)).sum()) for each in (reference, other)))
    # NaN is sorted last.
    one, two = (set(np.argsort(-each, kind="stable")[:count]) for each in (reference, other))
    return len(one & two) / count


def _log_probabilities(logits: Logits) -> NDArray[np.float64]:
    """Return natural log probabilities; a part of a distribution has them already."""
    values = logits.astype(np.float64)
    if np.isnan(values).any():
        return values
    shifted = values - values.max()
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return found
