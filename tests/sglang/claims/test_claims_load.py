"""Load near the pool's limit on a real server: claims come and go, and every request ends."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from threading import Event

import pytest
from claim_client import SECRET, ClaimClient
from conftest import ModelFolder, StartServer
from engine_client import new_message_id, request_body
from sglang_models import SglangModel

from leyline_engine.contract import ClaimKind, EditPayload

POOL = 1200
FLAGS = (f"--max-total-tokens={POOL}", "--chunked-prefill-size=128")
LIMITS = '{"share": 0.8, "engine_share": 0.9}'
CLIENTS, REQUESTS, CLAIMS = 4, 125, 30


@dataclass(frozen=True)
class Ended:
    """A request that came to its end."""

    seconds: float
    refused: bool


def text(rng: Random, length: int) -> list[int]:
    """Random tokens."""
    return [rng.randrange(10, 400) for _ in range(length)]


def run_client(base_url: str, number: int, opened: Event) -> Iterator[Ended]:
    """Requests of one tenant, long and short, that continue what it sent before."""
    rng = Random(number)
    tenant = "ab"[number % 2]
    with ClaimClient(base_url, SECRET) as client:
        history = text(rng, 150)
        client.open(f"s{number}", history, tenant=tenant)
        opened.set()
        for turn in range(REQUESTS):
            length = rng.choice([20, 60, 200, 500, 700])
            prompt = [*history, *text(rng, 20)] if rng.random() < 0.4 else text(rng, length)
            decode = rng.choice([2, 8, 40])
            name = new_message_id()
            began = time.monotonic()
            if rng.random() < 0.5:
                payload = EditPayload(session=f"r{number}", scope=tenant, turn=f"r{turn}")
                body = client.body(name, prompt, payload, decode=decode)
                answer = client.http.post("/generate", json=body)
                refused = client.record(name).receipt.refused
                assert (answer.status_code == 503) is (refused is not None), answer.text
                if refused is not None:
                    assert refused.own or refused.others
            else:
                answer = client.http.post("/generate", json=request_body(prompt, decode=decode))
            took = time.monotonic() - began
            if answer.status_code == 503:
                assert answer.json()["message"].startswith("refused_by_claim: "), answer.text
                time.sleep(0.2)
            else:
                assert len(answer.raise_for_status().json()["output_ids"]) == decode
            yield Ended(took, answer.status_code == 503)


def claim_now_and_then(base_url: str, done: Event) -> Counter[str]:
    """Claims over the clients' first turns, with short lives; some are revised or released."""
    rng, states = Random("claims"), Counter[str]()
    for number in range(CLAIMS):
        session = number % CLIENTS
        tenant = "ab"[session % 2]
        with ClaimClient(base_url, SECRET, f"load-{number}") as client:
            # KV evicted since is computed again, so that there is something to claim.
            source = f"c{number}"
            length = rng.choice([100, 300, 500])
            claimed = Random(session)
            prompt = [*text(claimed, 150), *text(rng, length)]
            client.http.post(
                "/generate",
                json=client.body(
                    new_message_id(),
                    prompt,
                    EditPayload(session=f"s{session}", scope=tenant, turn=source),
                    decode=2,
                ),
            )
            terms = {"tenant": tenant, "source": source, "ttl_s": rng.randint(1, 3)}
            kinds = [ClaimKind.HARD, ClaimKind.HARD, ClaimKind.SOFT]
            reply = client.claim(
                f"s{session}", length, kind=rng.choice(kinds), priority=rng.randint(0, 9), **terms
            )
            if reply.problem is None and rng.random() < 0.4:
                kind = rng.choice(list(ClaimKind))
                reply = client.claim(f"s{session}", 120, kind=kind, revision=2, **terms)
            if reply.problem is None and rng.random() < 0.4:
                done.wait(0.4)
                reply = client.release(tenant=tenant)
            code = reply.problem.code if reply.problem else reply.claims[0].state
            states[str(code)] += 1
        done.wait(rng.uniform(0.1, 0.8))
    return states


@pytest.mark.nightly
def test_no_request_waits_for_ever_and_nothing_leaks(
    start_server: StartServer, model_folder: ModelFolder
) -> None:
    """Each request is answered or refused by name; when all claims are gone, the pool is whole."""
    environment = {"LEYLINE_HINTS_SECRET": SECRET, "LEYLINE_CLAIM_LIMITS": LIMITS}
    server = start_server(model_folder(SglangModel.MLA), *FLAGS, environment=environment)
    opened, done = [Event() for _ in range(CLIENTS)], Event()
    began = time.monotonic()
    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        runs = [
            pool.submit(lambda n=n: list(run_client(server.base_url, n, opened[n])))
            for n in range(CLIENTS)
        ]
        for event in opened:
            assert event.wait(60)
        claims = pool.submit(claim_now_and_then, server.base_url, done)
        try:
            ended = [end for run in runs for end in run.result()]
        finally:
            done.set()
        states = claims.result()
    seconds = time.monotonic() - began
    refused = sum(end.refused for end in ended)
    took = sorted(end.seconds for end in ended)
    print(
        f"{len(ended) - refused} served, {refused} refused in {seconds:.0f} s; latency "
        f"p50 {took[len(took) // 2]:.2f} s, p99 {took[-len(took) // 100]:.2f} s; {dict(states)}"
    )
    assert len(ended) == CLIENTS * REQUESTS
    assert refused > 0
    assert sum(states.values()) == CLAIMS
    with ClaimClient(server.base_url, SECRET) as client:
        for status in client.live():
            client.release(status.claim.id, status.claim.tenant)
        client.wait_idle()
        longest = request_body(text(Random(0), POOL - 20), decode=4)
        assert len(client.post(longest)["output_ids"]) == 4
        client.http.post("/flush_cache").raise_for_status()
        assert client.load() == (0, 0)
