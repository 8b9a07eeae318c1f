"""References that are wrong on purpose: a comparison that passes them would prove nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from equality_kit import Played, distance, expect, piece_length
from oracle_models import OracleModel
from oracle_reference import Keep, Piece, Remembered

Turn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Moves keys ``[T, heads, d]`` from positions ``[T]`` to others."""


def misplaced(pieces: Sequence[Piece], right: Turn, wrong: Turn) -> list[Piece]:
    """The same pieces, remembered so that the reference places the moved ones wrongly.

    The reference turns a key by all of its target position. One that is first turned as computed,
    then moved in the wrong way, then turned back from its target comes out as moved wrongly.
    """
    result: list[Piece] = []
    at = 0
    for piece in pieces:
        if isinstance(piece, Keep) and piece.start != at:
            result.append(_misplaced(piece, at, right, wrong))
        else:
            result.append(piece)
        at += piece_length(piece)
    return result


def _misplaced(piece: Keep, dest: int, right: Turn, wrong: Turn) -> Keep:
    part = slice(piece.start, piece.end)
    here = torch.arange(piece.start, piece.end)
    there, origin = here + dest - piece.start, torch.zeros_like(here)

    def turned(key: torch.Tensor) -> torch.Tensor:
        return right(wrong(right(key, origin, here), here, there), there, origin)

    turn = Remembered(
        piece.turn.tokens[part],
        tuple(turned(key[part]) for key in piece.turn.keys),
        tuple(other[part] for other in piece.turn.others),
    )
    return Keep(turn, 0, piece.end - piece.start)


def control_error(subject: OracleModel, played: Played, right: Turn, wrong: Turn) -> float:
    """The distance of a server's answer from a reference that places kept keys wrongly."""
    output = played.tokens[played.prompt :]
    pieces = misplaced(played.pieces, right, wrong)
    return distance(played.scores, expect(subject, pieces, played.scored_from + 1, output))
