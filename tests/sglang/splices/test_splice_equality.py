"""A real SGLang server's splices against the amortize contract computed the long way round."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from equality_cases import play_random
from equality_checks import ROWS_BOUND, check_turn, rotary_restored
from equality_controls import control_error
from equality_kit import (
    BOUND,
    CONTROL_FACTOR,
    Played,
    PlayedSession,
    draw_tokens,
    moves_keys,
    row_errors,
)
from oracle_engine import TAMPERINGS
from oracle_reference import Keep
from pool_probe import TURNS
from sglang_models import SglangModel
from sglang_server import SglangServer

from leyline_engine.contract import Directive

CI_SESSIONS = 3
NIGHTLY_SESSIONS = 40
TURNS_EACH = 3
IN_CI = ("mla_server", "gqa_server")
NIGHTLY = (SglangModel.MLA_MOE, SglangModel.MLA_YARN, SglangModel.QWEN3)

Start = Callable[[SglangServer, str], PlayedSession]


def check_sessions(start: Start, server: SglangServer, seeds: range) -> None:
    """Play random sessions and check every turn of them."""
    most_copies = most_sources = 0
    for seed in seeds:
        session = start(server, f"seed{seed}")
        for played in play_random(session, random.Random(seed), TURNS_EACH):
            check_turn(session, played)
            kept = [piece for piece in played.pieces if isinstance(piece, Keep)]
            most_copies = max(most_copies, len(kept) - 1)
            most_sources = max(most_sources, len({id(piece.turn) for piece in kept}))
    assert most_copies >= 3
    assert most_sources == 2


@pytest.mark.parametrize("name", IN_CI)
def test_random_edits_give_the_contracts_answers(
    name: str, request: pytest.FixtureRequest, start_session: Start
) -> None:
    """Random edits over several turns and sources agree in answers, token counts and KV."""
    check_sessions(start_session, request.getfixturevalue(name), range(CI_SESSIONS))


@pytest.mark.nightly
@pytest.mark.parametrize("name", IN_CI)
def test_many_random_edits_give_the_contracts_answers(
    name: str, request: pytest.FixtureRequest, start_session: Start
) -> None:
    """The same over many other sessions."""
    seeds = range(1000, 1000 + NIGHTLY_SESSIONS)
    check_sessions(start_session, request.getfixturevalue(name), seeds)


@pytest.mark.nightly
@pytest.mark.parametrize("model", NIGHTLY)
def test_other_models_give_the_contracts_answers(
    model: SglangModel,
    start_server: Callable[..., SglangServer],
    model_folder: Callable[[SglangModel], Path],
    probed: dict[str, str],
    start_session: Start,
) -> None:
    """Experts, YaRN with an mscale, and normed keys agree, and wrong placements don't."""
    server = start_server(model_folder(model), environment=probed)
    check_sessions(start_session, server, range(2000, 2000 + NIGHTLY_SESSIONS))
    check_controls(start_session(server, "controls"))
    check_wrong_turns(start_session(server, "wrong"))


@pytest.mark.parametrize("name", IN_CI)
def test_the_reference_placed_wrongly_is_far_outside_the_bound(
    name: str, request: pytest.FixtureRequest, start_session: Start
) -> None:
    """A server's answer is a hundred bounds off from references that move keys wrongly."""
    check_controls(start_session(request.getfixturevalue(name), "controls"))


def check_controls(session: PlayedSession) -> None:
    """Compare one splice with every wrong reference, and with a right one got the same way."""
    # YaRN slows low frequencies only, and its mscale is near 1: they show where all keys that
    # are read moved far.
    rng = random.Random(session.session)
    opened = session.open(draw_tokens(rng, 1200))
    played = session.edit(opened, [Directive(40, 940)], draw_tokens(rng, 4))
    rotary = SimpleNamespace(
        inv_freq=session.subject.model.model.rotary_emb.inv_freq,
        pairing="interleaved" if session.subject.config.model_type == "deepseek_v2" else "halves",
    )
    moves = {how: make(rotary, session.subject) for how, make in TAMPERINGS.items()}
    right = moves.pop("none")
    assert control_error(session.subject, played, right, right) <= BOUND
    scaled = session.subject.config.rope_parameters["rope_type"] != "default"
    for how, wrong in moves.items():
        if scaled or how not in {"scaling_ignored", "scaled_twice"}:
            error = control_error(session.subject, played, right, wrong)
            assert error >= CONTROL_FACTOR * BOUND, how


@pytest.mark.parametrize("name", IN_CI)
def test_a_server_that_turns_keys_wrongly_is_far_outside_the_bound(
    name: str, request: pytest.FixtureRequest, start_session: Start
) -> None:
    """A pool whose rotary is wrong in a single way shows in every answer; a right one doesn't."""
    check_wrong_turns(start_session(request.getfixturevalue(name), "wrong"))


def check_wrong_turns(session: PlayedSession) -> None:
    """Splice the same turn under every rotary that the probe can put into the pool."""
    with rotary_restored(session):
        for how in (*TURNS, "right"):
            played = splice_once(session, turns_keys=how)
            errors = row_errors(session.subject, played)
            if how == "right":
                assert max(played.error / BOUND, errors.turning / ROWS_BOUND) <= 1
            else:
                assert played.error >= CONTROL_FACTOR * BOUND, how
                assert errors.turning >= CONTROL_FACTOR * ROWS_BOUND, how


def splice_once(session: PlayedSession, **options: Any) -> Played:
    """An edit of the session's opening that moves 140 tokens back and 80 forward."""
    rng = random.Random(f"{session.session} {len(session.turns)}")
    opened = session.turns[0] if session.turns else session.open(draw_tokens(rng, 300))
    edits = [Directive(60, 60, draw_tokens(rng, 13)), Directive(200, 250)]
    played = session.edit(opened, edits, draw_tokens(rng, 4), **options)
    assert played.receipt.tokens.spliced >= 200
    assert moves_keys(played.pieces)
    return played


@pytest.mark.parametrize("name", IN_CI)
def test_copies_keep_every_bit_that_does_not_turn(
    name: str, request: pytest.FixtureRequest, start_session: Start
) -> None:
    """Latents, or values, of spliced tokens are those of the source, bit for bit, elsewhere."""
    session = start_session(request.getfixturevalue(name), "bits")
    played = splice_once(session)
    before, after = session.turns[0].rows(), played.rows()
    for start, end, dest in ((60, 200, 73), (250, 330, 213)):
        here, there = slice(start, end), slice(dest, dest + end - start)
        assert set(before.slots[here].tolist()).isdisjoint(after.slots[there].tolist())
        for old, new in zip(before.still, after.still, strict=True):
            assert torch.equal(old[here], new[there])


@pytest.mark.parametrize("name", IN_CI)
def test_gaps_longer_than_a_chunk_are_staged(
    name: str, request: pytest.FixtureRequest, start_session: Start
) -> None:
    """Replacements longer than a prefill chunk, copies between and after them."""
    rng = random.Random(3)
    session = start_session(request.getfixturevalue(name), "staged")
    opened = session.open(draw_tokens(rng, 400))
    edits = [Directive(50, 60, draw_tokens(rng, 600)), Directive(200, 210, draw_tokens(rng, 520))]
    check_turn(session, session.edit(opened, edits, draw_tokens(rng, 3)))


@pytest.mark.parametrize("name", IN_CI)
def test_sessions_side_by_side_give_the_contracts_answers(
    name: str, request: pytest.FixtureRequest, start_session: Start
) -> None:
    """Splices of several sessions at once, whose gaps and decodes share forwards."""
    server: SglangServer = request.getfixturevalue(name)
    sessions = [start_session(server, f"beside{number}") for number in range(4)]
    with ThreadPoolExecutor(len(sessions)) as threads:
        list(threads.map(splice_once, sessions))
    for session in sessions:
        for played in session.turns:
            check_turn(session, played)
