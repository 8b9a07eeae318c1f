"""Claims on a real server with pages of 64 tokens, whose account of its slots is checked."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from claim_client import SECRET, ClaimClient, claim_server, claims_of, text
from conftest import ModelFolder
from engine_client import new_message_id, request_body
from sglang_models import SglangModel
from sglang_server import SglangServer

from leyline_engine.contract import (
    ClaimKind,
    ClaimState,
    Directive,
    EditPayload,
    Outcome,
    ProblemCode,
    SourceRef,
    apply_directives,
    sealed_digest,
    token_array,
    token_digest,
)

# The same runs on SGLang's own tree and allocator at each commit; here a server starts for it.
pytestmark = pytest.mark.nightly

PAGE = 64
POOL = 40 * PAGE
FLAGS = (f"--max-total-tokens={POOL}", f"--page-size={PAGE}", "--chunked-prefill-size=256")
HELD = 20 * PAGE


@pytest.fixture(scope="module")
def server(
    model_folder: ModelFolder, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SglangServer]:
    """A server with a small pool."""
    log = tmp_path_factory.mktemp("claims-pages-server") / "log"
    with claim_server(model_folder(SglangModel.MLA), log, FLAGS) as started:
        yield started


@pytest.fixture
def client(server: SglangServer) -> Iterator[ClaimClient]:
    """A client of a server without claims, which holds nothing afterwards."""
    with claims_of(server) as opened:
        yield opened


def send(client: ClaimClient, seed: str, length: int) -> httpx.Response:
    """A plain request of that many tokens."""
    return client.http.post("/generate", json=request_body(text(seed, length), decode=4))


def test_a_claims_life_in_pages(client: ClaimClient) -> None:
    """Taken over pages, revised, demoted, released: each answer counts whole pages."""
    client.open("s", text("life", HELD + 9))
    (status,) = client.claim("s", HELD + 10, start=PAGE + 1, ttl_s=60).claims
    assert status.state is ClaimState.MATERIALIZED
    assert status.resident_tokens == status.required_tokens == HELD - PAGE
    assert client.load() == (0, HELD)
    (status,) = client.claim("s", 3 * PAGE - 9, revision=2, kind=ClaimKind.SOFT).claims
    assert (status.resident_tokens, client.load()) == (3 * PAGE, (0, 0))
    client.claim("s", 3 * PAGE - 9, revision=3)
    assert client.load() == (0, 3 * PAGE)
    client.demote()
    assert (client.status().state, client.load()) == (ClaimState.DEMOTED, (0, 0))
    problem = client.claim("s", HELD + 10, start=HELD, revision=4).problem
    assert problem is not None
    assert (problem.code, problem.field) == (ProblemCode.INVALID_CLAIM, "predicate.start")
    assert f"begin before {HELD}" in problem.message
    (status,) = client.release().claims
    assert status.state is ClaimState.RELEASED


def test_the_limit_is_the_servers_own(client: ClaimClient) -> None:
    """A token below it is served beside the claim; at it, the refusal gives the numbers."""
    client.open("s", text("limit", HELD))
    client.claim("s", HELD)
    edge = POOL - HELD - PAGE - 4
    assert len(send(client, "fits", edge - 1).raise_for_status().json()["output_ids"]) == 4
    refused = send(client, "not", edge)
    assert refused.status_code == 503
    message = refused.json()["message"]
    assert message.startswith(f"refused_by_claim: the request needs {POOL - HELD} tokens of KV")
    assert f"1 claims leave {POOL - HELD} of {POOL}" in message
    assert client.status().resident_tokens == HELD
    client.release()
    send(client, "not", edge).raise_for_status()


def test_a_claim_follows_an_edit_across_page_edges(client: ClaimClient) -> None:
    """Its tokens move by seven; the pages that hold them are locked under the edited history, and a
    forget takes them."""
    prompt = text("moves", HELD)
    tokens = [*prompt, *client.open("m", prompt).output_ids]
    client.claim("m", 12 * PAGE, start=8 * PAGE)
    cut = Directive(5 * PAGE - 3, 5 * PAGE + 4)
    edited = [*apply_directives(tokens, (cut,)), 6, 7]
    digest = sealed_digest(token_digest(token_array(tokens)), SECRET)
    sources = (SourceRef("t1", len(tokens), digest),)
    name = new_message_id()
    payload = EditPayload(session="m", scope="a", turn="t2", sources=sources, directives=(cut,))
    client.post(client.body(name, edited, payload, decode=2))
    receipt = client.record(name).receipt
    assert receipt.outcome is Outcome.SPLICED
    client.until(lambda: client.status().claim.predicate.source == "t2")
    status = client.status()
    span = status.claim.predicate
    assert (span.start, span.end) == (8 * PAGE - 7, 12 * PAGE - 7)
    assert status.resident_tokens == status.required_tokens == 5 * PAGE
    assert client.load() == (0, 12 * PAGE)
    follow = EditPayload(
        session="m", scope="a", turn="t3", forget=("all",), lineage=receipt.lineage
    )
    client.post(client.body(new_message_id(), [*edited[:20], 5], follow, decode=2))
    assert client.status().state is ClaimState.HARMED
    assert client.load() == (0, 0)
