"""Checks of a server's splices against the contract, as tests of all kinds of servers make them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from equality_kit import BOUND, Played, PlayedSession, row_errors, spliced_by_contract
from oracle_reference import Keep

from leyline_engine.contract import Outcome

ROWS_BOUND = 1e-5
"""Largest difference of a pool row, as a share of the largest element of its layer."""


def check_turn(session: PlayedSession, played: Played) -> None:
    """A turn's log-probabilities, token counts and pool rows are those of the contract."""
    tokens = played.receipt.tokens
    spliced = spliced_by_contract(played.pieces)
    kept = played.pieces[0]
    prefix = kept.end if isinstance(kept, Keep) else 0
    assert (tokens.prompt, tokens.prefix, tokens.spliced) == (played.prompt, prefix, spliced)
    if spliced:
        assert played.receipt.outcome is Outcome.SPLICED
    assert played.error <= BOUND
    errors = row_errors(session.subject, played)
    assert max(errors.still, errors.turning) <= ROWS_BOUND


@contextmanager
def rotary_restored(session: PlayedSession) -> Iterator[None]:
    """The server's splices are right afterwards, whatever happens, and nothing wrong is cached."""
    try:
        yield
    finally:
        session.open([70, 71, 72], turns_keys="right")
        session.server.flush_cache()
