"""Claims on a real server: commands over HTTP, refusals as clients see them, and nothing leaked.

One server for all; SGLang's own account of its slots is asked when it stops.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest
from claim_client import SECRET, ClaimClient, claim_server, claims_of, text
from conftest import ModelFolder
from engine_client import new_message_id, request_body
from prometheus_client.parser import text_string_to_metric_families
from sglang_models import SglangModel
from sglang_server import SglangServer

from leyline_engine.contract import (
    CAPABILITY_PATH,
    MAX_COMMAND_BYTES,
    Capability,
    ClaimKind,
    ClaimState,
    Directive,
    EditPayload,
    GetClaimEvents,
    Outcome,
    ProblemCode,
    Reason,
    SourceRef,
    apply_directives,
    sealed_digest,
    token_array,
    token_digest,
)

POOL = 1000
FLAGS = (f"--max-total-tokens={POOL}", "--chunked-prefill-size=32")
HELD = 400
"""Tokens of a claim; a request of more than the rest can't run beside it."""
ATTEMPTS = 10
"""At sending a claim while a prompt is computed, on a machine that is busy with other tests."""


@pytest.fixture(scope="module")
def server(
    model_folder: ModelFolder, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SglangServer]:
    """A server with a small pool."""
    log = tmp_path_factory.mktemp("claims-server") / "log"
    with claim_server(model_folder(SglangModel.MLA), log, FLAGS) as started:
        yield started


@pytest.fixture
def client(server: SglangServer) -> Iterator[ClaimClient]:
    """A client of a server without claims, which holds nothing afterwards."""
    with claims_of(server) as opened:
        yield opened


def big(seed: str = "big", **options: Any) -> dict[str, Any]:
    """A plain request that needs more than a claim leaves."""
    return request_body(text(seed, POOL - HELD + 10), decode=4, **options)


def reason(answer: httpx.Response) -> dict[str, Any]:
    """Why a streamed ``/generate`` ended."""
    events = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    found: dict[str, Any] = json.loads(events[-1][len("data: ") :])["meta_info"]["finish_reason"]
    return found


def test_a_claims_life(client: ClaimClient) -> None:
    """Taken, listed, asked about, revised, released: each answer gives its state."""
    client.open("s", text("life", HELD))
    (status,) = client.claim("s", HELD, ttl_s=60).claims
    assert (status.state, status.resident_tokens) == (ClaimState.MATERIALIZED, HELD)
    assert client.load() == (0, HELD)
    assert [each.claim.id for each in client.live("a")] == [client.id]
    client.open("s", [*text("life", HELD), 5, 6], turn="t2")
    assert client.status().hits == 1
    (status,) = client.claim("s", 100, revision=2, kind=ClaimKind.SOFT, priority=3).claims
    assert (status.claim.kind, status.remaining_ms) == (ClaimKind.SOFT, None)
    assert client.load() == (0, 0)
    stale = client.claim("s", HELD, revision=2).problem
    assert stale is not None and stale.code is ProblemCode.STALE_REVISION
    (status,) = client.release().claims
    assert status.state is ClaimState.RELEASED
    assert client.live("a") == ()
    events = client.send(GetClaimEvents("a", client.id)).events
    kinds = [event["event"] for event in events]
    assert kinds[:4] == ["claim_requested", "entered", "found", "locked"]
    assert kinds[-2:] == ["released", "unranked"]
    assert [event["seq"] for event in events] == sorted(event["seq"] for event in events)
    later = client.send(GetClaimEvents("a", client.id, after=events[-2]["seq"])).events
    assert [event["event"] for event in later] == ["unranked"]


def test_what_does_not_fit_is_refused_at_once(client: ClaimClient) -> None:
    """Plain, streamed or with an envelope: 503 with a name, and after the release the answer."""
    client.open("s", text("refused", HELD))
    client.claim("s", HELD, ttl_s=60)
    began = time.monotonic()
    plain = client.http.post("/generate", json=big())
    assert plain.status_code == 503
    assert plain.json()["message"].startswith("refused_by_claim: the request needs 615 tokens")
    stream = reason(client.http.post("/generate", json=big(stream=True)))
    assert (stream["status_code"], stream["err_type"]) == (503, "refused_by_claim")
    name, mine = new_message_id(), EditPayload(session="x", scope="a", turn="t1")
    body = client.body(name, text("big", POOL - HELD + 10), mine, decode=4)
    assert client.http.post("/generate", json=body).status_code == 503
    receipt = client.record(name).receipt
    assert (receipt.outcome, receipt.reason) == (Outcome.REPREFILLED, Reason.REFUSED_BY_CLAIM)
    assert receipt.refused is not None
    assert (receipt.refused.own, receipt.refused.others) == ((client.id,), 0)
    assert receipt.refused.needed == 615
    assert receipt.turn == ""
    name, theirs = new_message_id(), EditPayload(session="x", scope="b", turn="t1")
    body = client.body(name, text("big", POOL - HELD + 10), theirs, decode=4)
    answer = client.http.post("/generate", json=body)
    assert answer.status_code == 503
    assert "yours" not in answer.text
    refused = client.record(name).receipt.refused
    assert refused is not None
    assert (refused.own, refused.others) == ((), 1)
    assert time.monotonic() - began < 10
    assert client.status().pressure == 4
    client.release()
    assert len(client.post(big())["output_ids"]) == 4


def test_a_claim_ends_by_itself(client: ClaimClient) -> None:
    """When its time is up, the requests it kept out run, though no command came meanwhile."""
    client.open("s", text("expiry", HELD))
    client.claim("s", HELD, ttl_s=2)
    assert "2 s have passed" in client.http.post("/generate", json=big()).json()["message"]
    deadline = time.monotonic() + 10
    while (answer := client.http.post("/generate", json=big())).status_code == 503:
        assert time.monotonic() < deadline, "the claim didn't end"
        time.sleep(0.1)
    assert len(answer.raise_for_status().json()["output_ids"]) == 4
    assert client.status().state is ClaimState.EXPIRED


def test_decoding_that_outgrows_the_claims_is_named(client: ClaimClient) -> None:
    """A claim comes while a request streams: it ends with a named error, and so says its
    receipt."""
    client.open("s", text("outgrown", HELD))
    name, payload = new_message_id(), EditPayload(session="w", scope="b", turn="t1")
    body = client.body(name, text("w", 250), payload, decode=600, stream=True)
    with client.http.stream("POST", "/generate", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        with ClaimClient(str(client.http.base_url), SECRET, client.id) as other:
            other.claim("s", HELD)
        last = [line for line in lines if line.startswith("data: {")][-1]
    finish = json.loads(last[len("data: ") :])["meta_info"]["finish_reason"]
    assert (finish["type"], finish["err_type"]) == ("abort", "refused_by_claim")
    receipt = client.record(name).receipt
    assert receipt.refused is not None
    assert (receipt.refused.own, receipt.refused.others) == ((), 1)
    assert receipt.detail == "decoding outgrew what claims leave"
    assert client.status().resident_tokens == HELD


def test_a_claim_between_two_chunks_ends_the_prompt(client: ClaimClient) -> None:
    """A long prompt was admitted when nothing was claimed. When a claim takes the slots of its
    later chunks, it is refused, and the server continues."""
    for attempt in range(ATTEMPTS):
        client.open(f"s{attempt}", text("chunks", HELD))
        long = request_body(text(f"long {attempt}", POOL - HELD + 200), decode=4)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(client.http.post, "/generate", json=long)
            # Too early, it is refused before it is queued.
            time.sleep(0.03)
            (status,) = client.claim(f"s{attempt}", HELD, id=f"{client.id}.{attempt}").claims
            refused = answer.result()
        if status.state is not ClaimState.MATERIALIZATION_FAILED:
            break
        assert refused.status_code == 200, "too late, all chunks had their slots"
    assert status.state is ClaimState.MATERIALIZED
    assert refused.status_code == 503
    assert refused.json()["message"].startswith("refused_by_claim: ")
    # SGLang answers first and gives the slots back a step later.
    client.until(lambda: client.load() == (0, HELD))


def test_a_flush_harms_live_claims(client: ClaimClient) -> None:
    """The operator may empty the cache: the claim says so, and its slots are free again."""
    client.open("s", text("flushed", HELD))
    client.claim("s", HELD)
    client.http.post("/flush_cache").raise_for_status()
    status = client.status()
    assert (status.state, status.cause) == (ClaimState.HARMED, "flushed")
    assert client.load() == (0, 0)
    assert len(client.post(request_body(text("all", POOL - 20), decode=4))["output_ids"]) == 4


def test_claims_that_can_not_be_taken(client: ClaimClient) -> None:
    """Each answer says what has to change, and leaves no record."""
    client.open("s", text("bad", HELD))
    client.open("t", text("other", 300), tenant="b")
    for reply, code, field in (
        (client.claim("never", 10), ProblemCode.INVALID_CLAIM, "predicate.source"),
        (client.claim("s", 10, source="t9"), ProblemCode.INVALID_CLAIM, "predicate.source"),
        (client.claim("t", 10), ProblemCode.INVALID_CLAIM, "predicate.source"),
        (client.claim("s", HELD + 2), ProblemCode.INVALID_CLAIM, "predicate.end"),
    ):
        assert reply.problem is not None
        assert (reply.problem.code, reply.problem.field) == (code, field)
    client.open("long", text("long", POOL // 2 + 20))
    too_much = client.claim("long", POOL // 2 + 1).problem
    assert too_much is not None
    assert (too_much.code, too_much.field) == (ProblemCode.CLAIM_LIMIT, "share")
    assert client.live() == ()
    assert client.load() == (0, 0)


def test_other_tenants_claims_are_as_unknown_as_none(client: ClaimClient) -> None:
    """Asked for, released or demoted: a foreign id has the answer of one that never was."""
    client.open("s", text("foreign", 100))
    client.claim("s", 100)
    for ask in (client.show, client.release, client.demote):
        foreign, never = ask(client.id, "b").problem, ask("never", "b").problem
        assert foreign == never
        assert foreign is not None and foreign.code is ProblemCode.UNKNOWN_CLAIM
    events = client.send(GetClaimEvents("b", client.id)).problem
    assert events == client.send(GetClaimEvents("b", "never")).problem
    assert client.send(GetClaimEvents("b")).events == ()
    assert client.live("b") == ()
    assert client.status().state is ClaimState.MATERIALIZED


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'{"command":"nothing"}',
        b"\xff",
        b'{"command":"get","tenant":"a"}',
        b'{"command":"get","tenant":"a","claim":"' + b"c" * 200 + b'"}',
        b'{"command":"list","limit":1000000}',
        b'{"command":"get","tenant":"a","claim":"c","x":' + b"[" * 30_000,
        b'{"command":"submit","claim":{"id":"c","tenant":"a","session":"s","kind":"hard",'
        b'"predicate":{"source":"t1","start":0,"end":10},"ttl_s":0}}',
        b'{"command":"submit","claim":{"id":"c","tenant":"a","session":"s","kind":"hard",'
        b'"predicate":{"source":"t1","start":0,"end":10},"ttl_s":3153600000}}',
        b'{"command":"submit","claim":{"id":"c","tenant":"a","session":"s","kind":"hard",'
        b'"predicate":{"source":"t1","start":5,"end":5}}}',
    ],
)
def test_junk_is_a_clear_error(client: ClaimClient, body: bytes) -> None:
    """It never reaches the scheduler."""
    answer = client.post_command(body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_command"


def test_only_the_proxy_is_obeyed(client: ClaimClient) -> None:
    """A missing or wrong signature is refused before the body is read as a command; so is a body
    that is too long, with any signature."""
    for signature in ("", "0" * 64, "é"):
        headers = {"x-leyline-signature": signature.encode()}
        answer = client.http.post("/leyline/claims", content=b'{"command":"list"}', headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "invalid_signature")
    answer = client.post_command(b" " * (MAX_COMMAND_BYTES + 1))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")


def test_without_claims_nothing_is_refused(client: ClaimClient) -> None:
    """Long, short, streamed: the pool is the requests', and answers don't depend on claims."""
    longest = request_body(text("longest", POOL - 20), decode=4)
    answer = client.post(longest)["output_ids"]
    client.open("s", text("claimed", HELD))
    client.claim("s", HELD)
    short = request_body(text("short", 100), decode=8)
    beside = client.post(short)["output_ids"]
    client.release()
    client.http.post("/flush_cache").raise_for_status()
    assert client.post(short)["output_ids"] == beside
    assert client.post(longest)["output_ids"] == answer


def owners(client: ClaimClient) -> dict[str, float]:
    """Slots of the pool by owner, as SGLang's ``/metrics`` has them."""
    text = client.http.get("/metrics").raise_for_status().text
    return {
        sample.labels["owner"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "leyline_engine_pool_tokens"
    }


def test_sglangs_metrics_tell_of_splice_claim_and_refusal(client: ClaimClient) -> None:
    """The owners of the pool's slots, sums of what was copied, sizes; within a second or two."""
    refusals = client.metric("leyline_engine_refusals_total")
    copied = client.metric("leyline_engine_splice_bytes_total")
    prompt = text("metrics", 300)
    tokens = [*prompt, *client.open("m", prompt).output_ids]
    edit = Directive(100, 120, (5,))
    edited = [*apply_directives(tokens, (edit,)), 6, 7]
    digest = sealed_digest(token_digest(token_array(tokens)), SECRET)
    sources, name = (SourceRef("t1", len(tokens), digest),), new_message_id()
    payload = EditPayload(session="m", scope="a", turn="t2", sources=sources, directives=(edit,))
    client.post(client.body(name, edited, payload, decode=2))
    receipt = client.record(name).receipt
    assert receipt.outcome is Outcome.SPLICED
    behind = receipt.lineage[0].start
    spliced = len(edited) + 1 - behind
    client.until(lambda: owners(client)["spliced"] == spliced)
    now = owners(client)
    # The replacement, too, was computed only from the text before it.
    assert now["exact"] == len(tokens) - 1 + behind - edit.start
    assert sum(now.values()) == client.metric("leyline_engine_pool_capacity_tokens") == POOL
    assert client.metric("leyline_engine_pool_peak_tokens") >= POOL - now["free"]
    capability = msgspec.json.decode(client.http.get(CAPABILITY_PATH).content, type=Capability)
    assert capability.kv is not None
    copies = client.metric("leyline_engine_splice_bytes_total") - copied
    assert copies == receipt.tokens.spliced * capability.kv.bytes_per_token > 0
    assert client.metric("leyline_engine_retained_turns") >= 2
    client.claim("m", 300)
    client.until(lambda: owners(client)["claimed"] == 300)
    assert owners(client)["exact"] == now["exact"] - 300
    refused = request_body(text("big", POOL - 290), decode=4)
    assert client.http.post("/generate", json=refused).status_code == 503
    client.until(lambda: client.metric("leyline_engine_refusals_total") == refusals + 1)
