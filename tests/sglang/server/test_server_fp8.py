"""A real server with FP8 KV, against the contract computed the long way round with FP8 KV.

The reference keeps keys and values in eight bits, too. A key that the server rounds the other way,
after another order of sums, moves all later ones a little.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from equality_checks import rotary_restored
from equality_kit import Played, PlayedSession, draw_tokens, piece_length, spliced_by_contract
from oracle_models import OracleModel
from oracle_reference import Keep
from pool_kit import FP8, roundings, turned
from sglang_models import SglangModel
from sglang_server import SglangServer

from leyline_engine.contract import Directive
from leyline_engine.rotary.rotation import Pairing, Rotary

BOUND = 5e-3
"""Largest |Δ log-probability| allowed, as a share of the largest |logit|. A reference that doesn't
round is ten times as far."""
ONE = 1.0001
"""One rounding, and a little for the arithmetic in fp32."""
OPENING, CUT = 400, 200


def rotary_of(subject: OracleModel) -> Rotary:
    """The rotation of a model's cached keys in SGLang."""
    model: Any = subject.model
    interleaved = subject.config.model_type == "deepseek_v2"
    pairing = Pairing.INTERLEAVED if interleaved else Pairing.HALF_SPLIT
    return Rotary(model.model.rotary_emb.inv_freq, pairing)


def edit(session: PlayedSession, source: Played, **options: Any) -> Played:
    """An insertion after 60 tokens, and a deletion: 140 tokens move on, the rest back."""
    rng = random.Random(f"{session.session} {len(session.turns)}")
    longer = Directive(60, 60, draw_tokens(rng, 13))
    return session.edit(source, [longer, Directive(CUT, CUT + 30)], draw_tokens(rng, 4), **options)


def computed_in(session: PlayedSession, played: Played, index: int) -> tuple[Played, int]:
    """The turn that computed a token's key, and the token's position there."""
    at = 0
    for piece in played.pieces:
        if at <= index < at + piece_length(piece) and isinstance(piece, Keep):
            source = next(turn for turn in session.turns if turn.truth is piece.turn)
            return computed_in(session, source, piece.start + index - at)
        at += piece_length(piece)
    return played, index


def check_rows(session: PlayedSession, played: Played) -> int:
    """Each row is the one that was computed, its key turned once; returns how many moved."""
    rotary, rows = rotary_of(session.subject), played.rows()
    places = torch.arange(len(rows.slots))
    found = [computed_in(session, played, index) for index in places.tolist()]
    homes = torch.tensor([at for _, at in found])
    computed = {turn.name: turn.rows() for turn, _ in found}
    for layer in range(len(rows.keys)):
        key, still = (
            torch.stack([getattr(computed[turn.name], part)[layer][at] for turn, at in found])
            for part in ("turning", "still")
        )
        assert roundings(rows.turning[layer], turned(key, rotary, homes, places)) <= ONE
        assert torch.equal(rows.still[layer], still)
    return int((homes != places).sum())


def check_server(session: PlayedSession, server: SglangServer) -> None:
    """Three edits, each of what the one before left; then wrong turns of the first one's keys."""
    session.subject = replace(session.subject, kv_dtype=FP8)
    opened = played = session.open(draw_tokens(random.Random(1), OPENING))
    assert played.error <= BOUND
    for _ in range(3):
        played = edit(session, played)
        assert played.receipt.tokens.spliced == spliced_by_contract(played.pieces) > 300
        assert played.error <= BOUND
        assert check_rows(session, played) > 300
    with rotary_restored(session):
        for how in ("no_rotation", "off_by_one", "right"):
            error = edit(session, opened, turns_keys=how).error
            assert (error <= BOUND) if how == "right" else (error > 20 * BOUND), how
    kv = httpx.get(f"{server.base_url}/leyline/capability", timeout=30).json()["kv"]
    assert (kv["dtype"], kv["origin_tokens"]) == ("float8_e4m3fn", 8192)
    assert kv["origin_bytes"] > 0


@pytest.mark.nightly
@pytest.mark.parametrize("model", [SglangModel.LLAMA, SglangModel.MLA])
def test_fp8_gives_the_contracts_answers(
    model: SglangModel,
    start_server: Callable[..., SglangServer],
    model_folder: Callable[[SglangModel], Path],
    probed: dict[str, str],
    start_session: Callable[[SglangServer, str], PlayedSession],
) -> None:
    """Prefilled and spliced turns agree with a reference of FP8 KV, wrong turns don't; keys are
    turned once, from what SGLang computed, and all else keeps its bits."""
    flags = ("--kv-cache-dtype", "fp8_e4m3")
    server = start_server(model_folder(model), *flags, environment=probed)
    check_server(start_session(server, "fp8"), server)
