"""Playing one case on both sides, and measuring how far apart they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from oracle_cases import Case, EditedTurn
from oracle_engine import Conversation, Ran, edited_prompt, kept_edits, start_engine, tamper
from oracle_models import OracleModel
from oracle_pages import in_whole_pages
from oracle_reference import (
    SINK,
    Fresh,
    Keep,
    LongWay,
    Piece,
    Remembered,
    amortized_pieces,
    computed_anew,
    long_way_round,
)

from leyline_engine.admit.plan import page_floor
from leyline_engine.contract import Outcome, Receipt

BOUND = 1e-4
"""Largest |Δlogit| allowed, as a share of the largest |logit|."""
CONTROL_FACTOR = 100
"""A wrong splice must be off by so many times the bound."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One turn on both sides."""

    error: float
    """Largest |Δlogit| over prompt end and forced tokens, each as a share of its max |logit|."""
    receipt: Receipt
    expected_prefix: int
    expected_spliced: int
    prompt: int


def relative_error(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Largest |Δ| over pairs of logit vectors, each relative to its largest |logit|."""
    return max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, expected, strict=True)
    )


def play(subject: OracleModel, case: Case, tampering: str = "", *, page: int = 1) -> list[Compared]:
    """Run a case through the engine and the long way round, turn by turn."""
    engine = start_engine(subject, case.chunk_tokens, page_tokens=page)
    if tampering:
        tamper(engine, tampering, subject)
    conversation = Conversation(engine)
    opened = conversation.open(case.opening, case.opening_answer.fed, case.opening_answer.unfed)
    truth = long_way_round(
        subject, [Fresh(case.opening)], case.opening_answer.fed, case.opening_answer.unfed
    )
    results = [
        Compared(
            relative_error(opened.logits, truth.logits), opened.receipt, 0, 0, len(case.opening)
        )
    ]
    for turn in case.turns:
        source = truth.turn
        ran = conversation.edit(
            turn.edits,
            turn.tail,
            turn.answer.fed,
            turn.answer.unfed,
            treatments=turn.treatments,
            boundary=turn.boundary,
        )
        pieces = contracted_pieces(source, turn)
        first = turn.edits[0][0]
        if page > 1:
            pieces = in_whole_pages(pieces, min(first, source.computed), page)
        # Windows let an engine copy, and continue, at some places only: its receipt says where.
        anchored = engine.cache.anchors.needed
        copied = copied_by(ran) if anchored else None
        truth = long_way_round(subject, pieces, turn.answer.fed, turn.answer.unfed, copied=copied)
        prompt = len(edited_prompt(source.tokens, turn.edits, turn.tail))
        prefix = page_floor(min(first, source.computed, prompt - 1), page)
        if anchored:
            assert ran.receipt.tokens.prefix <= prefix
            prefix = first = ran.receipt.tokens.prefix
        results.append(
            Compared(
                relative_error(ran.logits, truth.logits),
                ran.receipt,
                prefix,
                spliced_by_contract(truth, first if page == 1 else prefix),
                prompt,
            )
        )
    return results


def copied_by(ran: Ran) -> frozenset[int]:
    """The positions of a prompt that the engine didn't compute, by its receipt."""
    found = set(range(ran.receipt.tokens.prefix))
    for start, end in ran.receipt.extents:
        found.update(range(start, end))
    return frozenset(found)


def contracted_pieces(source: Remembered, turn: EditedTurn) -> list[Piece]:
    """The contract's version of an edited turn.

    The first edit that forgets or is exact ends all reuse: from the forgotten span's first reader
    on everything is computed again, and cases forget only spans that nothing before them has read.
    """
    pieces = amortized_pieces(source, turn.edits, turn.tail)
    reused = 2 * kept_edits(turn.treatments) + 1
    return [
        *without_boundary(pieces[:reused], turn.boundary),
        *computed_anew(pieces[reused:]),
    ]


def without_boundary(pieces: Sequence[Piece], boundary: int) -> list[Piece]:
    """The first ``boundary`` tokens of every kept piece after an edit are computed again."""
    result: list[Piece] = []
    at = 0
    for piece in pieces:
        match piece:
            case Keep(turn, start, end) if at > 0:
                cut = min(boundary, end - start)
                result += [Fresh(turn.tokens[start : start + cut]), Keep(turn, start + cut, end)]
                at += end - start
            case Keep(_, start, end):
                result.append(piece)
                at += end - start
            case Fresh(tokens):
                result.append(piece)
                at += len(tokens)
    return result


def spliced_by_contract(truth: LongWay, first_edit: int) -> int:
    """Kept positions after the first edit, none below the sink."""
    return sum(position >= max(first_edit, SINK) for position in truth.reused)


def check_receipt(compared: Compared) -> None:
    """The receipt counts what the contract says, and counts every token once."""
    tokens = compared.receipt.tokens
    assert tokens.prompt == compared.prompt
    assert tokens.prefix + tokens.spliced + tokens.prefilled == tokens.prompt
    assert (tokens.prefix, tokens.spliced) == (compared.expected_prefix, compared.expected_spliced)
    if compared.expected_spliced:
        assert compared.receipt.outcome is Outcome.SPLICED, compared.receipt.detail
