"""The conversations of the three-arm benchmark, and what their edits ask of an engine."""

from __future__ import annotations

from array import array
from zlib import crc32

import pytest

from leyline_engine.admit.edits import resolve_edit
from leyline_engine.admit.plan import plan_turn
from leyline_engine.contract import CopySegment, LineageRun, SourceRef, token_digest
from leyline_engine.records.ledger import SpanLedger
from leyline_engine.records.sources import SourceRegistry, SourceTurn
from leyline_lab.three_arm.workload import (
    BUILD_TOKENS,
    TURNS,
    Cut,
    Retained,
    Session,
    SessionName,
    Size,
    WorkloadTurn,
    assemble,
    edit_turn,
    replay_turn,
    write_script,
)

NAME = SessionName("scope", "session")
SIZE = Size.scaled(0.05)


def tokens_of(text: str) -> list[int]:
    """A token per two characters."""
    return [crc32(text[i : i + 2].encode()) & 0xFFFF for i in range(0, len(text), 2)]


@pytest.fixture
def session() -> Session:
    """A small session."""
    return made("1.0.0")


def made(seed: str) -> Session:
    """The small session of a seed."""
    return assemble(SIZE, [tokens_of(text) for text in write_script(seed, SIZE).texts])


def kept(name: str, tokens: tuple[int, ...]) -> Retained:
    """A turn followed by what was generated."""
    return Retained(name, (*tokens, 7, 8))


def resolved(
    turn: WorkloadTurn, prompt: tuple[int, ...], *retained: Retained
) -> tuple[CopySegment, ...]:
    """The copies that an engine makes of a turn, once it has checked them."""
    registry = SourceRegistry()
    for one in retained:
        tokens = array("q", one.tokens)
        source = SourceTurn(one.turn, tokens, token_digest(tokens), (), NAME.scope, NAME.session)
        registry.retain((NAME.scope, NAME.session), source)
    return resolve_edit(turn.payload, array("q", prompt), registry, SpanLedger()).copies


def test_a_conversation_has_its_size_and_grows_turn_by_turn(session: Session) -> None:
    """Six prompts, each the start of the next; the whole is as long as the scale says."""
    assert len(session.builds) == TURNS
    for shorter, longer in zip(session.builds, session.builds[1:], strict=False):
        assert longer[: len(shorter)] == shorter
    assert len(session.builds[-1]) == pytest.approx(Size.prompt_tokens(0.05), rel=0.2)
    assert made("1.0.0") == session
    assert made("1.0.1").builds[0][:40] != session.builds[0][:40]


def test_the_edit_swaps_one_word_and_moves_what_follows(session: Session) -> None:
    """The tokens before and after the word are the same, shifted."""
    start, end = session.word
    assert session.shift != 0
    assert session.edited == session.replayed[: len(session.edited)]
    assert session.replayed[:start] == session.builds[-1][:start]
    assert session.replayed[end + session.shift :] == session.builds[-1][end:]
    assert session.replayed[start : start + len(session.synonym)] == session.synonym


def test_a_synonym_of_equal_length_is_refused() -> None:
    """Nothing would move, and the control would show nothing."""
    pieces = [tokens_of(text) for text in write_script("x", SIZE).texts]
    pieces[3] = pieces[2]
    with pytest.raises(ValueError, match="nothing would move"):
        assemble(SIZE, pieces)


@pytest.mark.parametrize("boundary", [0, 5])
@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize("rows", [False, True])
def test_an_engine_of_larger_pages_prefills_what_is_itemised(
    page: int, boundary: int, rows: bool
) -> None:
    """The same where prefix and sources are whole pages, and copies are or begin at any row."""
    staged = set()
    cut = Cut(page, rows=rows)
    limits = {"min_copy": 32, "stage_cost": 64, "joins": True} if rows else {"page": page}
    pieces = [tokens_of(text) for text in write_script("1.0.0", Size(300 + 2 * page, 100)).texts]
    for length in range(300, 300 + 2 * page, 7):
        session = assemble(Size(length, 100), pieces)
        last = Retained("build5", (*session.builds[-1], *range(BUILD_TOKENS)))
        edited = Retained("edit", (*session.edited, *range(8)))
        cached = [(len(turn.tokens) - 1) // page * page for turn in (edited, last)]
        turns = [
            (
                edit_turn(session, NAME, last, boundary, cut=cut),
                session.edited,
                [last],
                cached[1:],
            ),
            (
                replay_turn(session, NAME, last, edited, boundary, cut=cut),
                session.replayed,
                [edited, last],
                cached,
            ),
        ]
        for turn, prompt, sources, available in turns:
            copies = resolved(turn, prompt, *sources)
            prefix = min(copies[0].end, available[0]) // page * page
            plan = plan_turn(len(prompt), prefix, copies, available, sink=32, **limits)
            assert plan.prefilled == turn.must.total
            assert len(plan.prefills) - 1 == turn.must.staged
            staged.add((turn.payload.turn, turn.must.staged))
    # A page of the edited turn that its answer doesn't fill is computed again, and then waited for.
    assert ("replay", 1) in staged


@pytest.mark.parametrize("boundary", [0, 5])
def test_an_engine_prefills_what_is_itemised(session: Session, boundary: int) -> None:
    """Edit and replay: the engine's own checks pass, and its plan prefills the items' sum."""
    last = kept("build5", session.builds[-1])
    edited = kept("edit", session.edited)
    edit = edit_turn(session, NAME, last, boundary)
    copies = resolved(edit, session.edited, last)
    plan = plan_turn(len(session.edited), session.word[0], copies, [len(last.tokens)], sink=32)
    assert plan.prefilled == edit.must.total == len(session.synonym) + boundary + 1
    assert len(plan.prefills) - 1 == edit.must.staged

    replay = replay_turn(session, NAME, last, edited, boundary)
    copies = resolved(replay, session.replayed, edited, last)
    lengths = [len(edited.tokens), len(last.tokens)]
    plan = plan_turn(len(session.replayed), len(session.edited), copies, lengths, sink=32)
    assert plan.prefilled == replay.must.total == boundary + 1
    assert len(plan.prefills) - 1 == replay.must.staged


def test_a_replay_names_both_requests_and_the_lineage(session: Session) -> None:
    """Sources carry their digests; the map of the edit goes along, or its KV isn't found."""
    runs = (LineageRun(400, "lineage"),)
    last = kept("build5", session.builds[-1])
    edited = Retained("edit", (*session.edited, 9), runs)
    payload = replay_turn(session, NAME, last, edited, 0).payload
    assert payload.lineage == runs
    assert payload.sources == (
        SourceRef("edit", len(session.edited) + 1, token_digest(edited.tokens)),
        SourceRef("build5", len(last.tokens), token_digest(last.tokens)),
    )
