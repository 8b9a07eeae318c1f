"""Real servers with a pool in the host's memory, and one on the device that is too small for what
they are asked: histories are evicted to the host, loaded back, edited and forgotten."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import httpx
import msgspec
import pytest
from conftest import ModelFolder, StartServer
from equality_checks import ROWS_BOUND, check_turn
from equality_kit import (
    BOUND,
    DECODED,
    Played,
    PlayedSession,
    ask,
    distance,
    draw_tokens,
    expect,
    fetch_record,
    row_errors,
    scores_of,
)
from oracle_reference import Fresh
from sglang_models import SglangModel
from sglang_server import SglangServer

from leyline_engine.contract import (
    Directive,
    EditPayload,
    Outcome,
    Proof,
    ProvePayload,
    SpanLabel,
    edit_envelope,
)

pytestmark = pytest.mark.nightly

SLOTS = 1500
FLAGS = ("--enable-hierarchical-cache", f"--max-total-tokens={SLOTS}", "--hicache-ratio=4")
Start = Callable[[SglangServer, str], PlayedSession]


def crowd(server: SglangServer, rng: random.Random) -> None:
    """Fill the device's pool with others' text."""
    for _ in range(2):
        server.generate(list(draw_tokens(rng, SLOTS // 2)), 1)


def loaded(server: SglangServer, prompt: tuple[int, ...]) -> tuple[int, int]:
    """Tokens of a prompt that came from the device and from the host."""
    details = server.generate(list(prompt), 1)["meta_info"]["cached_tokens_details"] or {}
    return details.get("device", 0), details.get("host", 0)


def proof_of(server: SglangServer, message: str) -> Proof:
    """A proof that is complete."""
    proof = fetch_record(server, message).receipt.proof
    assert proof is not None
    return proof


def check_history(session: PlayedSession, rng: random.Random) -> Played:
    """An edited history is spliced, evicted, and continued from the host as it was."""
    opened = session.open(draw_tokens(rng, 400))
    edits = [Directive(60, 60, draw_tokens(rng, 13)), Directive(200, 230)]
    edited = session.edit(opened, edits, draw_tokens(rng, 4))
    check_turn(session, edited)
    crowd(session.server, rng)
    continued = session.edit(edited, [], draw_tokens(rng, 5))
    check_turn(session, continued)
    assert continued.receipt.lineage == edited.receipt.lineage
    page = session.page
    assert continued.receipt.tokens.prefix == (len(edited.tokens) - 1) // page * page
    # What was loaded is a source like any other.
    again = session.edit(continued, [Directive(100, 120)], draw_tokens(rng, 3))
    assert again.receipt.outcome is Outcome.SPLICED
    assert again.error <= BOUND
    errors = row_errors(session.subject, again)
    assert max(errors.still, errors.turning) <= ROWS_BOUND
    return again


def check_forget(session: PlayedSession, rng: random.Random) -> None:
    """A span that only the host has is forgotten: proven, and computed again for whoever asks."""
    server = session.server
    prompt = draw_tokens(rng, 300)
    labels = (SpanLabel("a", 0, 150), SpanLabel("b", 150, 170), SpanLabel("c", 170, 300))
    session.open(prompt, spans=labels)
    crowd(server, rng)
    payload = EditPayload(
        session=session.session,
        scope=session.scope,
        turn="gone",
        spans=(labels[0], SpanLabel("b", 150, 150)),
        forget=("b",),
    )
    name = f"{session.session}.gone"
    hints = edit_envelope(name, payload, prove=ProvePayload(nonce="5e" * 32))
    parameters = {"custom_params": {"kv_hints": msgspec.to_builtins(hints)}, "max_new_tokens": 2}
    server.generate(list(prompt[:150]), 2, sampling_params={"temperature": 0} | parameters)
    forgot = fetch_record(server, name).receipt.forgot
    assert forgot is not None
    start, end = 150 // session.page, (len(prompt) + DECODED - 1) // session.page
    assert (forgot.overwritten, forgot.pending) == ((end - start) * session.page, 0)
    proof = proof_of(server, name)
    assert proof.complete and not proof.survivors, proof
    assert proof.doomed == end * session.page - 150
    assert any(place.place == "host" and place.scanned > 3 * SLOTS for place in proof.places)
    other = EditPayload(session="other", scope="other", turn="x")
    answer = ask(server, prompt, len(prompt) - 1, other, message=f"{name}.other")
    assert answer["meta_info"]["cached_tokens"] <= 150
    clean = expect(session.subject, [Fresh(prompt)], len(prompt), answer["output_ids"])
    assert distance(scores_of(answer), clean) <= BOUND


@dataclass(frozen=True)
class Case:
    """A server."""

    model: SglangModel
    flags: tuple[str, ...] = ()
    page: int = 1


CASES = {
    "mla": Case(SglangModel.MLA),
    "gqa-write-back": Case(SglangModel.LLAMA, ("--hicache-write-policy=write_back",)),
    "gqa-page-16": Case(
        SglangModel.LLAMA, ("--page-size=16", "--disable-overlap-schedule"), page=16
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_histories_come_back_from_the_host_and_forgets_reach_it(
    start_server: StartServer,
    model_folder: ModelFolder,
    probed: dict[str, str],
    start_session: Start,
    name: str,
) -> None:
    """Answers, rows and counts are the contract's, and a forget leaves nothing on the host."""
    case = CASES[name]
    server = start_server(model_folder(case.model), *FLAGS, *case.flags, environment=probed)
    capability = httpx.get(f"{server.base_url}/leyline/capability", timeout=30).json()
    assert capability["splices"], capability["unsupported_reason"]
    rng = random.Random(7)
    prompt = draw_tokens(rng, 700)
    server.generate(list(prompt), 1)
    crowd(server, rng)
    device, host = loaded(server, prompt)
    assert host > 600 > device
    for number in range(2):
        session = replace(start_session(server, f"h{number}"), page=case.page, scope=f"t{number}")
        check_history(session, rng)
        check_forget(replace(session, scope=f"forgetful{number}"), rng)


def test_two_ranks_keep_and_forget_the_same_copies(
    start_server: StartServer, model_folder: ModelFolder, start_session: Start
) -> None:
    """Tensor-parallel ranks load the same prefixes, and prove the same forget over their shards."""
    environment = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    folder = model_folder(SglangModel.LLAMA)
    server = start_server(folder, *FLAGS, "--tp=2", environment=environment)
    rng = random.Random(3)
    for _ in range(3):
        prompt = list(draw_tokens(rng, 700))
        first = server.generate(prompt, 8)
        crowd(server, rng)
        again = server.generate(prompt, 8)
        assert again["output_ids"] == first["output_ids"]
        assert again["meta_info"]["cached_tokens_details"]["host"] > 600
    check_forget(start_session(server, "ranks"), rng)
