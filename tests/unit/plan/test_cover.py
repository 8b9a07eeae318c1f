"""Covering a prompt with the kept runs of several sources."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from leyline_proxy.plan.synthesis import MIN_SWITCH, Piece, cover
from leyline_proxy.plan.token_diff import Kept

LENGTH = 600


@st.composite
def kept_runs(draw: st.DrawFn) -> list[Kept]:
    """One source's runs: disjoint, in the order of both sequences."""
    runs: list[Kept] = []
    start = dest = 0
    for _ in range(draw(st.integers(0, 5))):
        start += draw(st.integers(0, 40))
        dest += draw(st.integers(0, 80))
        length = draw(st.integers(1, 150))
        if dest + length > LENGTH:
            break
        runs.append(Kept(start, start + length, dest))
        start, dest = start + length, dest + length
    return runs


def tokens_of(runs: list[Kept]) -> dict[int, int]:
    """Destination to source position."""
    return {run.dest + at: run.start + at for run in runs for at in range(run.length)}


@given(st.lists(kept_runs(), min_size=1, max_size=4), st.data())
def test_a_cover_is_sound_and_no_poorer(sources: list[list[Kept]], data: st.DataObject) -> None:
    """Pieces are what their sources have, disjoint and in order, and hold all that one has."""
    preferred = data.draw(st.integers(0, len(sources) - 1))
    pieces = cover(sources, preferred)
    held = [tokens_of(runs) for runs in sources]
    covered: set[int] = set()
    end = 0
    for piece in pieces:
        assert piece.run.dest >= end
        end = piece.run.dest_end
        own = held[piece.source]
        for dest, start in tokens_of([piece.run]).items():
            assert own[dest] == start
            covered.add(dest)
    assert covered >= held[preferred].keys()
    foreign = len(covered) - len(held[preferred])
    assert foreign == 0 or foreign >= MIN_SWITCH
    if foreign == 0:
        assert pieces == tuple(Piece(preferred, run) for run in sources[preferred])
    assert pieces == cover(sources, preferred)


@given(st.lists(kept_runs(), min_size=2, max_size=4))
def test_nothing_long_is_left_out(sources: list[list[Kept]]) -> None:
    """Of no source's run as much as the minimum in one stretch stays out of the cover."""
    pieces = cover(sources, 0)
    covered = {at for piece in pieces for at in range(piece.run.dest, piece.run.dest_end)}
    for runs in sources:
        for run in runs:
            missing = [at for at in range(run.dest, run.dest_end) if at not in covered]
            stretches, last = 0, None
            for at in missing:
                stretches = stretches + 1 if last == at - 1 else 1
                last = at
                assert stretches < MIN_SWITCH


def test_the_source_in_use_goes_on() -> None:
    """A hole is filled by one piece, not by as many as the preferred source interrupts it with."""
    newest = [Kept(0, 100, 0), Kept(120, 140, 120), Kept(160, 300, 200)]
    branch = [Kept(0, 50, 0), Kept(90, 190, 100)]
    assert cover([newest, branch], 0) == (
        Piece(0, Kept(0, 100, 0)),
        Piece(1, Kept(90, 190, 100)),
        Piece(0, Kept(160, 300, 200)),
    )


def test_the_longest_beginning_is_taken_first() -> None:
    """The beginning is found, and everything after it is copied."""
    newest = [Kept(0, 40, 0), Kept(60, 300, 60)]
    older = [Kept(0, 120, 0)]
    assert cover([newest, older], 0)[0] == Piece(0, Kept(0, 40, 0)), "20 tokens more: not worth it"
    pieces = cover([[Kept(0, 40, 0), Kept(80, 300, 80)], older], 0)
    assert pieces == (Piece(1, Kept(0, 120, 0)), Piece(0, Kept(120, 300, 120)))


def test_short_pieces_are_not_worth_a_switch() -> None:
    """Less than the minimum is prefilled."""
    newest = [Kept(0, 100, 0), Kept(100, 200, 100 + MIN_SWITCH - 1)]
    assert {piece.source for piece in cover([newest, [Kept(0, 231, 0)]], 0)} == {0}
