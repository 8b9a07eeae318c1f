"""Claims that come and go near the pool's limit while clients talk: a test for hangs and leaks.

Clients hold conversations through a running proxy; beside them, claims of random kinds come, are
revised and go. Four things must hold:

* every request ends within a minute: with an answer, or with 503 ``refused_by_claim``;
* every refusal names the claims in the way: ids of claims that are live, or a number of others;
* a request that was refused is served once the claims are gone;
* in the end no claim is live and nothing is locked.

Give the engine a pool that a few conversations fill, as ``leyline serve`` does with
``LEYLINE_ENGINE_OPTIONS='{"pool_tokens": 4096}'``.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from ..harness.arguments import Arguments
from ..harness.report import Step, progress
from ..harness.statistics import percentile
from .outcome import report, text

STUCK_S = 60.0
CLAIMS = "/v1/leyline/claims"
OUTPUT = 8


@dataclass
class Tally:
    """Counts of a run."""

    counts: Counter[str] = field(default_factory=Counter)
    claims: Counter[str] = field(default_factory=Counter)
    """Claims by the state in which they ended, or by the limit that refused them."""
    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """Observations that must not happen."""


class Load:
    """One run against one proxy.

    Args:
        http: client whose base URL is the proxy's.
        capacity: tokens of the engine's pool.
    """

    def __init__(self, http: httpx.AsyncClient, capacity: int, model: str, seed: int) -> None:
        self.http = http
        self.capacity = capacity
        self.model = model
        self.rng = Random(seed)
        self.tally = Tally()
        self.sessions: dict[str, list[dict[str, str]]] = {}
        self.made = 0
        self.live: dict[str, int] = {}
        """Revisions of claims that were taken and not released."""
        self.ever: set[str] = set()

    def text(self, tokens: int) -> str:
        """Return a text of ``tokens`` tokens; the words are about a token and a half each."""
        return text(self.rng, max(1, int(tokens / 1.5)))

    async def talk(self, client: int, requests: int, step: Step) -> None:
        """Run one client: conversations that grow, and begin again when they are long."""
        number = 0
        for _ in range(requests):
            session = f"load-{client}-{number}"
            messages = self.sessions.setdefault(session, [])
            size = sum(len(message["content"].split()) for message in messages) * 1.5
            share = self.rng.choice((0.05, 0.05, 0.1, 0.3))
            said = {"role": "user", "content": self.text(int(self.capacity * share))}
            answer = await self.ask(session, [*messages, said])
            if answer is not None:
                messages += [said, {"role": "assistant", "content": answer}]
            if size > self.capacity * 0.5 or self.rng.random() < 0.05:
                number += 1
            step()

    async def ask(self, session: str, messages: list[dict[str, str]]) -> str | None:
        """Send one request; returns None if it was refused."""
        body = {"model": self.model, "messages": messages, "max_tokens": OUTPUT, "temperature": 0}
        began = time.monotonic()
        try:
            answer = await self.http.post(
                "/v1/chat/completions", json=body, headers={"x-leyline-session": session}
            )
        except httpx.TimeoutException:
            self.tally.wrong.append(f"a request of {session} took more than {STUCK_S:.0f} s")
            return None
        self.tally.seconds.append(time.monotonic() - began)
        document = answer.json()
        if answer.status_code == httpx.codes.OK:
            self.tally.counts["served"] += 1
            return str(document["choices"][0]["message"]["content"] or "")
        error = document["error"]
        if error.get("code") == "refused_by_claim":
            self.tally.counts["refused_by_claim"] += 1
            self._check_refusal(answer, error)
        elif answer.status_code == httpx.codes.BAD_REQUEST:
            self.tally.counts["too_long"] += 1
        else:
            self.tally.wrong.append(f"status {answer.status_code}, {error.get('code')}")
        return None

    def _check_refusal(self, answer: httpx.Response, error: dict[str, Any]) -> None:
        named, others = error.get("claims", []), error.get("other_claims", 0)
        if not named and not others:
            self.tally.wrong.append("a refusal that names nobody")
        if unknown := set(named) - self.ever:
            self.tally.wrong.append(f"a refusal names {sorted(unknown)}, which nobody claimed")
        if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
            self.tally.wrong.append(f"a refusal with status {answer.status_code}")
        if "retry-after" in answer.headers:
            self.tally.counts["refusals with Retry-After"] += 1

    async def claim(self, claims: int, until: asyncio.Event) -> None:
        """Make, revise and release claims until the clients have ended."""
        while not until.is_set():
            await asyncio.sleep(self.rng.uniform(0.01, 0.1))
            talked = [name for name, messages in self.sessions.items() if messages]
            if not talked:
                continue
            if len(self.live) >= claims or (self.live and self.rng.random() < 0.3):
                await self.change(self.rng.choice(sorted(self.live)))
            elif self.made < 20 * claims:
                # Recently used sessions are cached; now and then one that may not be.
                lately = talked[-4:] if self.rng.random() < 0.9 else talked
                await self.submit(self.rng.choice(lately))

    async def submit(self, session: str) -> None:
        """Submit a new claim on a session."""
        self.made += 1
        name = f"load-{self.made}"
        self.ever.add(name)
        body: dict[str, Any] = {
            "id": name,
            "session": session,
            "kind": self.rng.choice(("hard", "hard", "soft")),
            "priority": self.rng.randrange(10),
            "ttl_s": self.rng.choice((None, 1, 2, 5)),
            "predicate": {"share": self.rng.choice((0.5, 1.0))},
        }
        answer = await self.http.post(CLAIMS, json=body)
        if answer.status_code == httpx.codes.CREATED:
            self.live[name] = 1
            return
        error = answer.json()["error"]
        self.tally.claims[f"not taken: {error.get('param') or error['code']}"] += 1
        if answer.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
            self.tally.wrong.append(f"a claim got status {answer.status_code}")

    async def change(self, name: str) -> None:
        """Release a claim, or put a later revision in its place."""
        if self.rng.random() < 0.7:
            await self.release(name)
            return
        self.live[name] += 1
        body = {"revision": self.live[name], "kind": self.rng.choice(("hard", "soft"))}
        answer = await self.http.patch(f"{CLAIMS}/{name}", json=body)
        if answer.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
            self.tally.wrong.append(f"a revision got status {answer.status_code}")

    async def release(self, name: str) -> None:
        """End a claim, and count how it ended."""
        del self.live[name]
        answer = await self.http.delete(f"{CLAIMS}/{name}")
        if answer.status_code != httpx.codes.OK:
            self.tally.wrong.append(f"a release got status {answer.status_code}")
            return
        self.tally.claims[answer.json()["state"]] += 1

    async def settle(self) -> None:
        """Release all claims; then serve a request that needs most of the pool."""
        for name in sorted(self.live):
            await self.release(name)
        left = (await self.http.get(CLAIMS)).json()["claims"]
        if left:
            self.tally.wrong.append(f"{len(left)} claims are live in the end")
        before = self.tally.counts["served"]
        large = {"role": "user", "content": self.text(int(self.capacity * 0.6))}
        await self.ask("load-last", [large])
        if self.tally.counts["served"] == before:
            self.tally.wrong.append("a large request isn't served after all claims have gone")


async def run(url: str, *, clients: int, requests: int, claims: int, seed: int) -> Tally:
    """Run the whole load."""
    async with httpx.AsyncClient(base_url=url, timeout=STUCK_S) as http:
        capability = (await http.get("/leyline/capability")).raise_for_status().json()
        model = (await http.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        load = Load(http, capability["kv"]["capacity_tokens"], model, seed)
        ended = asyncio.Event()
        with progress("requests", requests) as step:
            claiming = asyncio.create_task(load.claim(claims, ended))
            share = [requests // clients + (n < requests % clients) for n in range(clients)]
            await asyncio.gather(*(load.talk(n, s, step) for n, s in enumerate(share)))
            ended.set()
            await claiming
        await load.settle()
    return load.tally


def main() -> int:
    """Run, print, write; returns 1 if anything happened that must not."""
    parser = Arguments(__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8790", help="the proxy")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--claims", type=int, default=30, help="live at a time, at most")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    load = run(
        given.url,
        clients=given.clients,
        requests=given.requests,
        claims=given.claims,
        seed=given.seed,
    )
    tally = asyncio.run(load)
    found = {
        "requests": dict(tally.counts),
        "claims": dict(tally.claims),
        "p50_s": statistics.median(tally.seconds),
        "p99_s": percentile(tally.seconds, 0.99),
        "max_s": max(tally.seconds),
        "wrong": tally.wrong,
    }
    return report(given.json, found, passed=not tally.wrong)
