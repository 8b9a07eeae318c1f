"""Tokens of a prompt that any reuse could serve from live sequences, and that other methods find.

Nothing here uses the index, the matcher or the fingerprints of the engine: the sequences whose KV
is live are compared token by token; see :mod:`leyline_lab.reuse.verbatim_runs`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from leyline_engine.contract import ATTENTION_SINK, common_prefix

from .arms import AlignedRuns, Arm, ContentChunks
from .verbatim_runs import MIN_RUN, Mask, Windows


def new_arms() -> dict[str, Arm]:
    """Return the methods that are compared, by name: the paper's chunks, and LMCache's rule."""
    return {"cdc": ContentChunks(), "lmcache": AlignedRuns(256)}


def recoverable_tokens(live: Iterable[array[int]], prompt: array[int], prefix: int) -> int:
    """Return how many tokens outside the prefix lie in verbatim runs of 64 tokens or more.

    A run is of equal ids in the prompt and in one live sequence, without the first 32 positions of
    either and without the prompt's last token; no reuse may serve those. It may begin in the
    prefix: its tokens there count for its length, but not for the answer.

    Args:
        live: token ids of the sequences whose KV is cached.
        prefix: number of leading tokens that the exact prefix serves.
    """
    pieces: list[array[int]] = []
    for sequence, known in _with_known(live):
        piece = sequence[max(ATTENTION_SINK, known - MIN_RUN + 1) :]
        if len(piece) >= MIN_RUN:
            pieces.append(piece)
    mask = Windows(pieces, MIN_RUN).covered(prompt[ATTENTION_SINK:-1])
    return int(mask[max(0, prefix - ATTENTION_SINK) :].sum())


def tokens_by_arm(live: Iterable[array[int]], prompt: array[int], prefix: int) -> Mapping[str, int]:
    """Return how many tokens outside the prefix each method finds, by its name.

    The prompt's first 32 positions and its last token don't count. The first positions of a source
    do: the methods know no sink.

    Args: as for :func:`recoverable_tokens`.
    """
    arms = new_arms()
    for sequence, known in _with_known(live):
        for arm in arms.values():
            arm.remember(sequence, known)
    return {name: _beyond(arm.served(prompt, prefix), prefix) for name, arm in arms.items()}


def _beyond(mask: Mask, prefix: int) -> int:
    return int(mask[max(prefix, ATTENTION_SINK) : -1].sum())


def _with_known(live: Iterable[array[int]]) -> list[tuple[array[int], int]]:
    """Return sequences in order, each with how much of it the one before begins with as well."""
    ordered: Sequence[array[int]] = sorted(live)
    shared = [common_prefix(*pair) for pair in pairwise(ordered)]
    return list(zip(ordered, [0, *shared], strict=False))
