"""Clients that leave, aborts, flushes, chunks, retractions: a real server gets through all of them.

Each test asks in the end that nothing runs, waits or is locked; that the log is clean, and with it
SGLang's own account of every slot, is asked when the server stops.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from conftest import ModelFolder, StartServer
from engine_client import EngineClient, new_message_id, request_body, source_of
from sglang_models import SglangModel
from sglang_server import SglangServer

from leyline_engine.contract import (
    CAPABILITY_PATH,
    Directive,
    EditPayload,
    Outcome,
    Reason,
    TurnRecord,
    apply_directives,
    edit_envelope,
)

SCOPE = "life"
STRAINED = ("--chunked-prefill-size=64", "--max-total-tokens=2600")
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
LONG = 400
"""Tokens of an answer that is still being written when a test acts on it."""


@dataclass
class Edit:
    """A session with one finished turn, and the edit that comes next."""

    prompt: list[int]
    payload: EditPayload

    def body(self, name: str, **options: Any) -> dict[str, Any]:
        """The request for it."""
        return request_body(self.prompt, edit_envelope(name, self.payload), **options)


def text(seed: str, length: int) -> list[int]:
    """Random tokens."""
    rng = Random(seed)
    return [rng.randrange(10, 400) for _ in range(length)]


def begin(client: EngineClient, session: str, *, gap: int = 3, length: int = 240) -> Edit:
    """Run a session's first turn.

    Args:
        gap: tokens of the two replacements, which are staged.
    """
    opening = text(session, length)
    answer, _ = client.turn(opening, EditPayload(session=session, scope=SCOPE, turn="t1"))
    source = [*opening, *answer]
    new = text(f"{session} new", 2 * gap)
    cuts = (Directive(50, 60, tuple(new[:gap])), Directive(120, 150, tuple(new[gap:])))
    payload = EditPayload(
        session=session,
        scope=SCOPE,
        turn="t2",
        sources=(source_of("t1", source),),
        directives=cuts,
    )
    return Edit([*apply_directives(source, cuts), 5, 6], payload)


def spliced(record: TurnRecord) -> int:
    """The number of spliced tokens; asserts that there are some."""
    assert record.receipt.reason is Reason.SPLICED
    assert record.receipt.tokens.spliced > 0
    return record.receipt.tokens.spliced


@pytest.fixture
def client(mla_server: SglangServer) -> Iterator[EngineClient]:
    """A client of the shared server, which is idle again afterwards."""
    with EngineClient(mla_server.base_url) as opened:
        yield opened
        opened.wait_idle()


def leave(base_url: str, body: dict[str, Any], pieces: int) -> None:
    """Read ``pieces`` events of a stream and hang up."""
    with (
        httpx.Client(base_url=base_url, timeout=120) as gone,
        gone.stream("POST", "/generate", json=body | {"stream": True}) as answer,
    ):
        lines = (line for line in answer.iter_lines() if line)
        for _ in range(pieces):
            next(lines)


@pytest.mark.parametrize("pieces", [0, 1, 5])
def test_a_client_that_leaves_takes_nothing_along(
    client: EngineClient, mla_server: SglangServer, pieces: int
) -> None:
    """Whenever a client hangs up, its edit can be sent again and is spliced."""
    edit = begin(client, f"leaves {pieces}")
    leave(mla_server.base_url, edit.body(new_message_id(), decode=LONG), pieces)
    client.wait_idle()
    _, record = client.turn(edit.prompt, edit.payload)
    spliced(record)


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.3])
def test_an_aborted_edit_ends(client: EngineClient, delay_s: float) -> None:
    """Aborted while it waits, is staged or runs, a request ends, and its turn is no source."""
    edit = begin(client, f"aborted {delay_s}")
    name = new_message_id()
    body = edit.body(name, decode=LONG, rid=f"rid {name}")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.http.post, "/generate", json=body)
        deadline = time.monotonic() + 60
        time.sleep(delay_s)
        while not answer.done():
            assert time.monotonic() < deadline, "an abort was not obeyed"
            client.http.post("/abort_request", json={"rid": f"rid {name}"}).raise_for_status()
            time.sleep(0.05)
        finish = answer.result().json()["meta_info"]["finish_reason"]
    assert finish["type"] == "abort"
    client.wait_idle()
    source = source_of("t2", edit.prompt)
    later = EditPayload(
        session=edit.payload.session,
        scope=SCOPE,
        turn="t3",
        sources=(source,),
        directives=(Directive(40, 50),),
    )
    _, record = client.turn(apply_directives(edit.prompt, later.directives), later)
    assert record.receipt.reason is Reason.MISSING_SOURCE


def test_a_gap_is_computed_beside_an_answer_of_a_least_length(client: EngineClient) -> None:
    """For ``min_tokens``, SGLang asks every row of a batch for its tokenizer, also the engine's."""
    edit = begin(client, "beside")
    longest = {"sampling_params": {"min_new_tokens": LONG, "max_new_tokens": LONG}}
    with ThreadPoolExecutor(1) as pool:
        body = request_body(text("long", 40)) | longest
        answer = pool.submit(client.http.post, "/generate", json=body)
        while client.load()[0] == 0 and not answer.done():
            time.sleep(0.01)
        _, record = client.turn(edit.prompt, edit.payload)
        assert not answer.done(), "control: it ended first"
        assert record.receipt.stages > 0, "control: no gap was computed"
        spliced(record)
        assert len(answer.result().json()["output_ids"]) == LONG


def test_aborting_all_leaves_the_server_serving(client: EngineClient) -> None:
    """With edits under way in several sessions, everything ends at once."""
    edits = [begin(client, f"all {i}") for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        posts = [
            pool.submit(client.http.post, "/generate", json=e.body(new_message_id(), decode=LONG))
            for e in edits
        ]
        while not all(post.done() for post in posts):
            client.http.post("/abort_request", json={"abort_all": True}).raise_for_status()
            time.sleep(0.05)
    client.wait_idle()
    for edit in edits:
        _, record = client.turn(edit.prompt, edit.payload)
        spliced(record)


def test_a_flush_under_way_is_refused_and_harmless(client: EngineClient) -> None:
    """While an edit runs, a flush is refused; afterwards it empties the tree and the registry."""
    edit = begin(client, "flushed")
    name = new_message_id()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.http.post, "/generate", json=edit.body(name, decode=LONG))
        while client.load()[0] == 0 and not answer.done():
            time.sleep(0.01)
        refused = client.http.post("/flush_cache")
        assert len(answer.result().json()["output_ids"]) == LONG
    assert refused.is_error
    spliced(client.record(name))
    client.wait_idle()
    client.http.post("/flush_cache").raise_for_status()
    _, record = client.turn(edit.prompt, edit.payload)
    assert record.receipt.reason is Reason.MISSING_SOURCE


def run_sessions(base_url: str, sessions: int, turns: int, decode: int) -> list[TurnRecord]:
    """Concurrent sessions that edit every turn; the receipts of all edits."""

    def run(number: int) -> list[TurnRecord]:
        rng = Random(number)
        name = f"concurrent {number} {time.monotonic_ns()}"
        records = []
        with EngineClient(base_url) as own:
            prompt = text(name, 260)
            payload = EditPayload(session=name, scope=SCOPE, turn="0")
            for turn in range(1, turns + 1):
                answer, record = own.turn(prompt, payload, decode=decode)
                assert len(answer) == decode
                records.append(record)
                source = [*prompt, *answer]
                a, b, c, d = sorted(rng.sample(range(40, len(source)), 4))
                new = text(f"{name} {turn}", rng.choice([2, 90]) + b - a)
                cuts = (Directive(a, b, tuple(new)), Directive(c, d))
                prompt = [*apply_directives(source, cuts), 5][:400]
                payload = EditPayload(
                    session=name,
                    scope=SCOPE,
                    turn=str(turn),
                    sources=(source_of(str(turn - 1), source),),
                    directives=cuts,
                    lineage=record.receipt.lineage,
                )
        return records[1:]

    with ThreadPoolExecutor(sessions) as pool:
        return [record for records in pool.map(run, range(sessions)) for record in records]


def check_edits(records: list[TurnRecord]) -> None:
    """Every edit was spliced, or says that memory was short."""
    reasons = {record.receipt.reason for record in records}
    assert reasons <= {Reason.SPLICED, Reason.SOURCE_EVICTED, Reason.NOTHING_TO_REUSE}
    assert sum(record.receipt.outcome is Outcome.SPLICED for record in records) > len(records) / 4


def test_concurrent_sessions(client: EngineClient, mla_server: SglangServer) -> None:
    """Sessions that splice beside each other all get what they ask for."""
    records = run_sessions(mla_server.base_url, 4, 3, 6)
    assert {record.receipt.reason for record in records} == {Reason.SPLICED}


@pytest.mark.nightly
def test_chunks_retractions_and_memory_pressure(
    start_server: StartServer, model_folder: ModelFolder
) -> None:
    """Gaps longer than a chunk, long answers that don't fit together, and rows taken away."""
    server = start_server(model_folder(SglangModel.MLA), *STRAINED, environment=RETRACTING)
    with EngineClient(server.base_url) as client:
        edit = begin(client, "chunked", gap=150)
        _, record = client.turn(edit.prompt, edit.payload)
        assert record.receipt.tokens.prefilled > 2 * 64
        spliced(record)
        check_edits(run_sessions(server.base_url, 5, 4, 60))
        assert client.metric("sglang:num_retracted_requests_total") > 0
        client.wait_idle()


@pytest.mark.nightly
def test_without_overlap(start_server: StartServer, model_folder: ModelFolder) -> None:
    """The same with one batch at a time."""
    flags = (*STRAINED, "--disable-overlap-schedule")
    server = start_server(model_folder(SglangModel.MLA), *flags, environment=RETRACTING)
    check_edits(run_sessions(server.base_url, 5, 4, 60))
    with EngineClient(server.base_url) as client:
        client.wait_idle()


@pytest.mark.nightly
def test_unsigned_envelopes_are_refused(
    start_server: StartServer, model_folder: ModelFolder
) -> None:
    """A server with a secret acts on nothing that the proxy didn't sign."""
    secret = {"LEYLINE_HINTS_SECRET": "a secret of the test"}
    server = start_server(model_folder(SglangModel.MLA), environment=secret)
    with EngineClient(server.base_url) as client:
        prompt = text("unsigned", 100)
        payload = EditPayload(session="s", scope=SCOPE, turn="t1")
        answer, record = client.turn(prompt, payload)
        assert record.receipt.reason is Reason.INVALID_EDIT
        assert answer == client.plain(prompt)


@pytest.mark.nightly
def test_a_server_that_is_told_to_end_takes_no_more_requests(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    """Requests under way are answered to their end; later ones are sent elsewhere, and it stops."""
    body = request_body(text("ends", 100), None, decode=LONG) | {"stream": True}
    with (
        SglangServer(model_folder(SglangModel.MLA), tmp_path / "server.log") as server,
        httpx.Client(base_url=server.base_url, timeout=120) as client,
        client.stream("POST", "/generate", json=body) as answer,
    ):
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        server.terminate()
        for path in ("/v1/chat/completions", "/generate"):
            refused = httpx.post(f"{server.base_url}{path}", json={}, timeout=60)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                503,
                "engine_stopping",
            )
        assert httpx.get(f"{server.base_url}/v1/models", timeout=60).status_code == 503
        assert httpx.get(f"{server.base_url}{CAPABILITY_PATH}", timeout=60).status_code == 200
        assert list(lines)[-1] == "data: [DONE]"
        assert server.ended(within_s=60)
