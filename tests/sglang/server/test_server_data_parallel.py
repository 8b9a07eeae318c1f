"""Two data-parallel replicas at one address, or two ranks of data-parallel attention: a session and
its KV stay on one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from random import Random
from threading import Event
from typing import Any

import httpx
import msgspec
import pytest
from conftest import ModelFolder
from equality_cases import play_random
from equality_checks import check_turn
from equality_kit import PlayedSession, fetch_record
from ledger_client import post_question
from sglang_models import SglangModel
from sglang_server import SglangServer

from leyline_engine.contract import (
    CAPABILITY_PATH,
    Capability,
    Directive,
    EditPayload,
    ForgetCounts,
    Outcome,
    Receipt,
    SourceRef,
    SpanLabel,
    apply_directives,
    edit_envelope,
    token_digest,
)
from leyline_engine.sglang.ranks import session_rank

RANKS = 2
REPLICAS = (SglangModel.MLA, ())
ATTENTION = (SglangModel.MLA_MOE, (f"--tp={RANKS}", "--enable-dp-attention"))
"""Ranks that share the experts: each computes with the other's tokens in every forward."""
HEAD, SECRET, TAIL = 120, 40, 140

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module", params=[REPLICAS, ATTENTION], ids=["replicas", "attention"])
def replicas(
    request: pytest.FixtureRequest,
    model_folder: ModelFolder,
    probed: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SglangServer]:
    """A server of two replicas; its log must be clean in the end."""
    log = tmp_path_factory.mktemp("replicas") / "log"
    model, more = request.param
    flags = (f"--dp-size={RANKS}", "--max-total-tokens=4096", *more)
    environment = probed | {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with SglangServer(model_folder(model), log, flags, environment) as server:
        yield server
        server.check_clean()


def text(length: int, seed: object) -> list[int]:
    """Random tokens."""
    rng = Random(str(seed))
    return [rng.randrange(10, 400) for _ in range(length)]


def send(
    server: SglangServer, prompt: Sequence[int], payload: EditPayload, **body: Any
) -> tuple[list[int], Receipt]:
    """One turn; the whole of its tokens, and its receipt."""
    name = f"{payload.session}.{payload.turn}"
    hints = msgspec.to_builtins(edit_envelope(name, payload))
    sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    sampling |= {"custom_params": {"kv_hints": hints}}
    answer = server.generate(list(prompt), 4, sampling_params=sampling, **body)
    return [*prompt, *answer["output_ids"]], fetch_record(server, name).receipt


def cached(server: SglangServer, prompt: Sequence[int], rank: int) -> int:
    """The number of a prompt's tokens that one replica has, asked without a session."""
    answer = server.generate(list(prompt), 1, routed_dp_rank=rank)
    found: int = answer["meta_info"]["cached_tokens"]
    return found


def labelled(session: str, turn: str, prompt: Sequence[int], **more: Any) -> EditPayload:
    """A turn of a session whose second span is the secret."""
    ends = (0, HEAD, HEAD + SECRET, len(prompt))
    spans = tuple(
        SpanLabel(name, start, end)
        for name, start, end in zip(("head", "secret", "rest"), ends, ends[1:], strict=False)
    )
    return EditPayload(session=session, scope="t", turn=turn, spans=spans, **more)


def test_the_server_splices_and_says_how_many_it_is(replicas: SglangServer) -> None:
    """The capability document counts the replicas."""
    answer = httpx.get(f"{replicas.base_url}{CAPABILITY_PATH}")
    capability = msgspec.convert(answer.json(), Capability)
    assert capability.splices, capability.unsupported_reason
    assert capability.data_parallel == RANKS


def converse(server: SglangServer, session: str) -> list[int]:
    """Five turns of a session, of which the client wants each elsewhere; all their tokens."""
    prompt = text(HEAD + SECRET + TAIL, session)
    for turn, rank in enumerate((None, 0, 1, None, None)):
        asked = {} if rank is None else {"routed_dp_rank": rank}
        before = len(prompt)
        prompt, receipt = send(server, prompt, labelled(session, f"t{turn}", prompt), **asked)
        assert receipt.tokens.prefix == (before - 1 if turn else 0)
    return prompt


def test_a_session_stays_on_one_replica(replicas: SglangServer) -> None:
    """Each turn finds the one before, whichever replica the client asks for; the other has none."""
    prompt = converse(replicas, "stays")
    has = [cached(replicas, prompt, rank) for rank in range(RANKS)]
    assert sorted(has) == [0, len(prompt) - 1]


def test_a_session_s_replica_answers_about_its_ledger(replicas: SglangServer) -> None:
    """For sessions of both replicas, the server knows the turns that hold a span."""
    names = [f"ledger{number}" for number in range(4)]
    for name in names:
        converse(replicas, name)
        found = post_question(replicas.base_url, "secret", session=name)
        assert (found.spans["secret"].turns, found.spans["secret"].first) == (5, HEAD)
    assert {session_rank(("t", name), RANKS) for name in names} == set(range(RANKS))


@pytest.mark.parametrize("asked", [0, 1])
@pytest.mark.parametrize("session", ["s0", "s1", "s2"])
def test_what_a_session_forgets_is_on_no_replica(
    replicas: SglangServer, session: str, asked: int
) -> None:
    """After a forget, none of them has a token of the secret or after it."""
    session = f"{session}.{asked}"
    prompt = converse(replicas, session)
    redacted = [*prompt[:HEAD], 7, *prompt[HEAD + SECRET :]]
    spans = (SpanLabel("head", 0, HEAD), SpanLabel("rest", HEAD, len(redacted)))
    forget = EditPayload(session=session, scope="t", turn="f", spans=spans, forget=("secret",))
    _, receipt = send(replicas, redacted, forget, routed_dp_rank=asked)
    assert receipt.forgot == ForgetCounts(overwritten=len(prompt) - 1 - HEAD)
    has = [cached(replicas, prompt, rank) for rank in range(RANKS)]
    assert sorted(has) == [0, HEAD]


def test_sessions_are_spread_and_spliced(replicas: SglangServer) -> None:
    """Edits are spliced on both replicas."""
    homes = set()
    for number in range(6):
        session = f"e{number}"
        source, _ = send(
            replicas,
            opening := text(HEAD + SECRET + TAIL, session),
            labelled(session, "t0", opening),
        )
        cut = (Directive(HEAD, HEAD + SECRET),)
        prompt = [*apply_directives(source, cut), 9]
        edit = EditPayload(
            session=session,
            scope="t",
            turn="t1",
            sources=(SourceRef("t0", len(source), token_digest(source)),),
            directives=cut,
        )
        _, receipt = send(replicas, prompt, edit)
        assert receipt.outcome is Outcome.SPLICED
        homes.add(max(range(RANKS), key=lambda rank: cached(replicas, opening, rank)))
    assert homes == set(range(RANKS))


@contextmanager
def busy(server: SglangServer, rank: int, tokens: int) -> Iterator[Event]:
    """Answers of so many tokens on one replica, without a session, until the block ends.

    Yields:
        Set while none has ended.
    """
    stop, first = Event(), Event()

    def answer() -> None:
        while not stop.is_set():
            written = server.generate(text(HEAD, f"busy {rank}"), tokens, routed_dp_rank=rank)
            assert len(written["output_ids"]) == tokens
            first.clear()

    first.set()
    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(answer)
        try:
            yield first
        finally:
            stop.set()
        answering.result()


@pytest.mark.parametrize("rank", range(RANKS))
def test_an_idle_replica_forgets_while_another_answers(replicas: SglangServer, rank: int) -> None:
    """A forget on a replica without other requests doesn't wait for the other's long answer."""
    session = next(s for s in map("idle{}".format, range(9)) if session_rank(("t", s), 2) == rank)
    prompt = converse(replicas, session)
    with busy(replicas, 1 - rank, 1500) as first:
        redacted = [*prompt[:HEAD], 7, *prompt[HEAD + SECRET :]]
        spans = (SpanLabel("head", 0, HEAD), SpanLabel("rest", HEAD, len(redacted)))
        forget = EditPayload(session=session, scope="t", turn="f", spans=spans, forget=("secret",))
        _, receipt = send(replicas, redacted, forget)
        found = post_question(replicas.base_url, "secret", session=session)
        assert first.is_set()
    assert receipt.forgot == ForgetCounts(overwritten=len(prompt) - 1 - HEAD)
    assert found.spans["secret"].turns == 0


@pytest.mark.parametrize("rank", range(RANKS))
def test_splices_beside_another_replica_s_answer_are_the_contract_s(
    replicas: SglangServer, rank: int, start_session: Callable[[SglangServer, str], PlayedSession]
) -> None:
    """Answers and KV of edited turns agree while the other replica decodes."""
    session = start_session(replicas, "beside")
    while session_rank((session.scope, session.session), RANKS) != rank:
        session.session += "."
    spliced = 0
    with busy(replicas, 1 - rank, 200):
        for played in play_random(session, Random(rank), 3):
            check_turn(session, played)
            spliced += played.receipt.tokens.spliced
    assert spliced >= 100
