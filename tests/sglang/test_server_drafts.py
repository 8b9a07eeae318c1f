"""A real server with EAGLE's drafts: the contract's answers, and draft rows that move along."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from draft_models import draft_flags
from equality_cases import play_random
from equality_kit import BOUND, CONTROL_FACTOR, Played, PlayedSession, piece_length
from oracle_reference import Keep
from pool_kit import error, turned
from pool_probe import read_drafts
from sglang_models import SglangModel
from sglang_server import SglangServer
from test_server_pages import check_isolation
from test_splice_equality import ROWS_BOUND, check_turn

from leyline_engine.rotation import Pairing, Rotary

Start = Callable[[SglangServer, str], PlayedSession]


def rotary_of(folder: Path) -> Rotary:
    """The draft model's rotary embedding, from its configuration alone."""
    config = json.loads((folder / "config.json").read_text())
    width, base = config["head_dim"], config["rope_parameters"]["rope_theta"]
    inv_freq = 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    return Rotary(inv_freq.float(), Pairing.HALF_SPLIT)


def copies(session: PlayedSession, played: Played) -> Iterator[tuple[Keep, Played, int]]:
    """The pieces of a turn's prompt that were copied, the turns they are of, and their places."""
    of = {id(turn.truth): turn for turn in session.turns}
    at = 0
    for number, piece in enumerate(played.pieces):
        if isinstance(piece, Keep) and number:
            yield piece, of[id(piece.turn)], at
        at += piece_length(piece)


def check_drafts(session: PlayedSession, played: Played, rotary: Rotary) -> int:
    """Copied draft rows are the source's, keys turned in float64; those at seams are empty.

    Returns:
        The number of rows whose keys had to turn; as they were, they are far off.
    """
    moved = 0
    after = read_drafts(played.rows_file)
    for piece, source, dest in copies(session, played):
        before = read_drafts(source.rows_file)
        end = dest + piece_length(piece)
        seam = source.tokens[piece.end] != played.tokens[end]
        here, there = slice(piece.start, piece.end - seam), slice(dest, end - seam)
        if seam:
            assert not after.keys[0][end - 1].any() and not after.values[0][end - 1].any()
        filled = before.keys[0][here].flatten(1).any(dim=1)  # those of earlier seams aren't
        old, new = before.keys[0][here][filled].double(), after.keys[0][there][filled]
        assert torch.equal(before.values[0][here], after.values[0][there])
        places = torch.arange(piece.start, piece.start + len(filled))[filled]
        wanted = turned(old, rotary, places, places + dest - piece.start)
        assert error(new, wanted, rotary) <= ROWS_BOUND
        if dest != piece.start and len(old):
            assert error(new, old, rotary) >= CONTROL_FACTOR * ROWS_BOUND
            moved += len(old)
    return moved


def check_server(start: Start, server: SglangServer, page: int, seeds: range) -> None:
    """Random sessions and isolation on one server."""
    (draft,) = (Path(flag) for flag in server._flags if flag.endswith("draft"))
    rotary = rotary_of(draft)

    def begin(name: str) -> PlayedSession:
        return replace(start(server, name), page=page, ahead=1)

    moved = 0
    for seed in seeds:
        session = begin(f"seed{seed}")
        for played in play_random(session, random.Random(seed), 3):
            check_turn(session, played)
            moved += check_drafts(session, played, rotary)
    assert moved > 100
    check_isolation(begin("private"))


def check_capability(server: SglangServer) -> None:
    """The handshake names the algorithm, and counts its layers."""
    answer = httpx.get(f"{server.base_url}/leyline/capability", timeout=30).json()
    assert answer["splices"] is True
    assert (answer["speculative"], answer["draft_layers"]) == ("EAGLE", 1)


def test_drafts_are_spliced_with_the_contracts_answers(
    start_server: Callable[..., SglangServer],
    model_folder: Callable[[SglangModel], Path],
    probed: dict[str, str],
    start_session: Start,
    tmp_path: Path,
) -> None:
    """Answers, counts and rows of a server that drafts three tokens agree, and its draft rows."""
    folder = model_folder(SglangModel.LLAMA)
    flags = draft_flags(folder, tmp_path / "draft", 3)
    server = start_server(folder, *flags, environment=probed)
    check_capability(server)
    check_server(start_session, server, 1, range(2))


@pytest.mark.nightly
@pytest.mark.parametrize("served", [(1, 1), (16, 3), (64, 2)])
def test_drafts_over_pages_give_the_contracts_answers(
    served: tuple[int, int],
    start_server: Callable[..., SglangServer],
    model_folder: Callable[[SglangModel], Path],
    probed: dict[str, str],
    start_session: Start,
    tmp_path: Path,
) -> None:
    """The same over more sessions, and where a slot is found by a token of the next page."""
    page, steps = served
    folder = model_folder(SglangModel.LLAMA)
    flags = draft_flags(folder, tmp_path / "draft", steps)
    server = start_server(folder, *flags, "--page-size", str(page), environment=probed)
    check_server(start_session, server, page, range(5000, 5006))
