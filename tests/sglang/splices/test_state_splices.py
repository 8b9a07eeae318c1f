"""Real servers splice models with windows and recurrent states, as transformers says they must."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_client import EngineClient
from sglang_models import SglangModel
from sglang_server import SglangServer
from state_contract import TAMPERINGS, StateModel
from state_sessions import BOUND, StateSession

from leyline_engine.contract import Directive, Mode, Outcome, Reason, RecurrentEdits

ModelFolder = Callable[[SglangModel], Path]
StartServer = Callable[..., SglangServer]

NO_BUFFER = ("--mamba-radix-cache-strategy=no_buffer", "--disable-overlap-schedule")
EXTRA_BUFFER = ("--mamba-radix-cache-strategy=extra_buffer", "--mamba-track-interval=64")
CONTROL = 100
"""A wrong splice must be off by so many times the bound."""


@pytest.fixture(autouse=True)
def no_gradients() -> None:
    """The reference never learns."""
    torch.set_grad_enabled(False)


def check_session(session: StateSession, *, recurrent: bool) -> None:
    """Play a deletion, a stub, several cuts and an edit of edited turns, and compare each."""
    assert session.open(700).error() < BOUND, "the server itself is off"
    edits = [
        [Directive(512, 560)],
        [Directive(300, 340, session.draw(7))],
        [Directive(100, 130, session.draw(3)), Directive(400, 450), Directive(500, 520)],
        [],
        [Directive(200, 215, session.draw(20))],
    ]
    for directives in edits:
        played = session.edit(directives)
        assert played.error() < BOUND, f"{directives}: {played.receipt}"
        tokens = played.receipt.tokens
        if not directives:
            assert tokens.prefilled < 80
            continue
        assert played.receipt.outcome is Outcome.SPLICED, played.receipt
        assert played.receipt.state == ("kept" if recurrent else "")
        assert tokens.spliced > 100
        wrong = TAMPERINGS if recurrent else TAMPERINGS[:1]
        off = {kind: played.error(kind) for kind in wrong}
        assert max(off.values()) > CONTROL * BOUND, off


def check_refusal(session: StateSession) -> None:
    """Nobody gets a kept state who wants exact ones, and a forget leaves none."""
    session.consent = RecurrentEdits.EXACT
    played = session.edit([Directive(300, 320)])
    assert (played.receipt.outcome, played.receipt.reason) == (
        Outcome.REPREFILLED,
        Reason.RECURRENT_STATE,
    )
    assert played.receipt.state == ""
    assert played.error() < BOUND
    session.consent = RecurrentEdits.KEPT
    forgot = session.edit([Directive(150, 170, mode=Mode.FORGET)])
    assert forgot.receipt.forgot is not None
    assert forgot.receipt.forgot.overwritten > 0
    assert forgot.receipt.tokens.served <= 150
    assert forgot.error() < BOUND


def check_server(server: SglangServer, folder: Path, *, recurrent: bool) -> None:
    """Check one session on a server."""
    with EngineClient(server.base_url) as client:
        capability = client.http.get("/leyline/capability").json()
        assert capability["splices"], capability["unsupported_reason"]
        state = capability["state"]
        assert bool(state["recurrent_layers"]) is recurrent
        assert state["edits"] == ("kept" if recurrent else "")
        session = StateSession(client, StateModel(folder), 7)
        check_session(session, recurrent=recurrent)
        if recurrent:
            check_refusal(session)
        client.wait_idle()


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        pytest.param(SglangModel.QWEN3_NEXT, EXTRA_BUFFER, id="qwen3_next"),
        pytest.param(SglangModel.MELLUM, (), id="mellum"),
    ],
)
def test_edits_give_the_contracts_answers(
    model: SglangModel,
    flags: tuple[str, ...],
    model_folder: ModelFolder,
    start_server: StartServer,
) -> None:
    """A chain of edits on each kind of state agrees in every answer, and wrong splices are far."""
    folder = model_folder(model)
    recurrent = model is not SglangModel.MELLUM
    check_server(start_server(folder, *flags), folder, recurrent=recurrent)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "flags", "recurrent"),
    [
        pytest.param(SglangModel.QWEN3_NEXT, NO_BUFFER, True, id="qwen3_next-no_buffer"),
        pytest.param(SglangModel.QWEN3_5, EXTRA_BUFFER, True, id="qwen3_5"),
        pytest.param(SglangModel.NEMOTRON_H, EXTRA_BUFFER, True, id="nemotron_h"),
        pytest.param(SglangModel.GRANITE_HYBRID, EXTRA_BUFFER, True, id="granite_hybrid"),
        pytest.param(SglangModel.LFM2, NO_BUFFER, True, id="lfm2"),
        pytest.param(SglangModel.GPT_OSS, (), False, id="gpt_oss"),
        pytest.param(SglangModel.MELLUM, ("--page-size=16",), False, id="mellum-pages"),
    ],
)
def test_further_families_too(
    model: SglangModel,
    flags: tuple[str, ...],
    recurrent: bool,
    model_folder: ModelFolder,
    start_server: StartServer,
) -> None:
    """Every family that runs on a CPU agrees, too."""
    folder = model_folder(model)
    check_server(start_server(folder, *flags), folder, recurrent=recurrent)
