"""A real server with pages of several tokens, against the contract computed the long way round."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from equality_cases import play_random
from equality_checks import check_turn, rotary_restored
from equality_kit import (
    BOUND,
    CONTROL_FACTOR,
    Played,
    PlayedSession,
    ask,
    distance,
    draw_tokens,
    expect,
    moves_keys,
    scores_of,
)
from oracle_reference import Fresh, Keep
from sglang_models import SglangModel
from sglang_server import SglangServer

from leyline_engine.contract import Directive, EditPayload, SpanLabel

Start = Callable[[SglangServer, str], PlayedSession]

FIRST = 60
"""Position of the first edit."""


def shifted(session: PlayedSession, **options: str) -> Played:
    """An edit of the session's opening that moves 200 tokens by 13, and the rest by -17."""
    rng = random.Random(f"{session.session} {len(session.turns)}")
    opened = session.turns[0] if session.turns else session.open(draw_tokens(rng, 560))
    edits = [Directive(FIRST, FIRST, draw_tokens(rng, 13)), Directive(260, 290)]
    return session.edit(opened, edits, draw_tokens(rng, 4), **options)


def check_controls(session: PlayedSession) -> None:
    """A right splice agrees; one that turns no key, or by one position too much, is far off."""
    with rotary_restored(session):
        for how in ("no_rotation", "off_by_one", "right"):
            played = shifted(session, turns_keys=how)
            assert played.receipt.tokens.spliced >= 256
            assert moves_keys(played.pieces)
            if how == "right":
                check_turn(session, played)
            else:
                assert played.error >= CONTROL_FACTOR * BOUND, how


def check_isolation(session: PlayedSession) -> None:
    """Another tenant with the same tokens and map gets exact pages, and a clean run's answer."""
    played = shifted(session)
    prompt = played.tokens[: played.prompt]
    other = EditPayload(session="other", scope="other", turn="x", lineage=played.receipt.lineage)
    answer = ask(session.server, prompt, len(prompt) - 1, other, message=f"{session.session}.other")
    # The replacement is exact, too: it was computed before the first copy was made.
    exact = played.receipt.lineage[0].start
    assert exact % session.page == 0
    assert answer["meta_info"]["cached_tokens"] == exact
    clean = expect(session.subject, [Fresh(prompt)], len(prompt), answer["output_ids"])
    assert distance(scores_of(answer), clean) <= BOUND


def check_forget(session: PlayedSession) -> None:
    """A forget gives back, overwritten, the pages from the span's own on."""
    rng = random.Random(session.session)
    prompt = draw_tokens(rng, 300)
    labels = (SpanLabel("a", 0, 150), SpanLabel("b", 150, 170), SpanLabel("c", 170, 300))
    told = session.open(prompt, spans=labels)
    without = (*prompt[:150], *prompt[170:])
    kept = (labels[0], SpanLabel("b", 150, 150), SpanLabel("c", 150, 280))
    played = session.open(without, spans=kept, forget=("b",), watch=told)
    forgot, page = played.receipt.forgot, session.page
    assert forgot is not None
    assert (forgot.pending, forgot.shared_retained) == (0, 0)
    start = 150 // page * page
    assert forgot.overwritten == (len(told.tokens) - 1) // page * page - start
    assert played.receipt.tokens.prefix == start


def check_server(start: Start, server: SglangServer, page: int, seeds: range) -> None:
    """Random sessions, controls, isolation and a forget on one server."""

    def begin(name: str) -> PlayedSession:
        return replace(start(server, name), page=page)

    check_controls(begin("controls"))
    check_isolation(begin("private"))
    # Unlabelled turns of its tenant may have read anything.
    check_forget(replace(begin("forget"), scope="forgetful"))
    spliced = 0
    for seed in seeds:
        session = begin(f"seed{seed}")
        for played in play_random(session, random.Random(seed), 3):
            check_turn(session, played)
            spliced += any(isinstance(piece, Keep) for piece in played.pieces[1:])
    assert spliced >= len(seeds)


@pytest.mark.nightly
def test_pages_of_16_give_the_contracts_answers(
    start_server: Callable[..., SglangServer],
    model_folder: Callable[[SglangModel], Path],
    probed: dict[str, str],
    start_session: Start,
) -> None:
    """Answers, counts and rows of an MLA server agree; wrong rotations and other sessions don't."""
    folder = model_folder(SglangModel.MLA)
    server = start_server(folder, "--page-size", "16", environment=probed)
    check_server(start_session, server, 16, range(1))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "served", [(SglangModel.LLAMA, 16), (SglangModel.MLA, 64), (SglangModel.LLAMA, 128)]
)
def test_larger_pages_give_the_contracts_answers(
    served: tuple[SglangModel, int],
    start_server: Callable[..., SglangServer],
    model_folder: Callable[[SglangModel], Path],
    probed: dict[str, str],
    start_session: Start,
) -> None:
    """The same over more sessions, with grouped queries, and with larger pages."""
    model, page = served
    server = start_server(model_folder(model), "--page-size", str(page), environment=probed)
    check_server(start_session, server, page, range(4000, 4010))
