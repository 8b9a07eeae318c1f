"""Random sessions against a running SGLang server, as a test for leaks, hangs and wrong answers.

Every session appends, edits, returns to an earlier turn and hangs up, at random; now and then all
of them pause and the cache is flushed. Three things must hold:

* no request waits for longer than a minute, and in the end nothing runs or is locked;
* every answer without a splice is the answer of the same prompt computed from nothing (where the
  two differ at a tie, within ``TIE`` of log-probability, it is counted as one);
* receipts come for every request that ended.

Give the server a pool too small for the sessions, so that turns are evicted, retracted and staged
again:

    python -m leyline_lab.sglang_cpu.launch --model-path MODEL --max-total-tokens 4096
"""

from __future__ import annotations

import argparse
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx
import msgspec

from leyline_engine.contract import (
    ATTENTION_SINK,
    RECEIPT_PATH,
    Directive,
    EditPayload,
    LineageRun,
    SourceRef,
    TurnRecord,
    apply_directives,
    edit_envelope,
    token_array,
    token_digest,
)

from ..harness.arguments import Arguments
from ..harness.report import Step, progress
from .outcome import report

SCOPE = "soak"
STUCK_S = 60.0
RECEIPT_S = 10.0
TIE = 1e-4
"""Difference of log-probabilities below which two tokens may change places with the batch."""
LONGEST = 600
BRANCHES = 4
"""Number of turns to which a session may return."""


@dataclass(frozen=True)
class Kept:
    """A finished turn, as a proxy would retain it."""

    name: str
    tokens: list[int]
    lineage: tuple[LineageRun, ...]


@dataclass
class Tally:
    """Counts of all sessions. One lock, as sessions run side by side."""

    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    peak_locked: int = 0
    peak_requests: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str) -> None:
        """Count one."""
        with self.lock:
            self.counts[name] += 1

    def receipt(self, record: TurnRecord) -> None:
        """Count a receipt's outcome."""
        receipt = record.receipt
        with self.lock:
            self.reasons[receipt.reason.value if receipt.reason else "none"] += 1
            for kind in ("prefix", "spliced", "reused", "prefilled"):
                self.tokens[kind] += getattr(receipt.tokens, kind)

    def load(self, requests: int, locked: int) -> None:
        """Note the server's load."""
        with self.lock:
            self.peak_requests = max(self.peak_requests, requests)
            self.peak_locked = max(self.peak_locked, locked)


class Gate:
    """Lets sessions take turns, or one flush happen while none does."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = 0
        self._closed = False

    def __enter__(self) -> None:
        with self._condition:
            self._condition.wait_for(lambda: not self._closed)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._condition:
            self._inside -= 1
            self._condition.notify_all()

    def alone(self, act: Callable[[], None]) -> None:
        """Run ``act`` when every turn under way has ended."""
        with self._condition:
            self._closed = True
            self._condition.wait_for(lambda: self._inside == 0)
        try:
            act()
        finally:
            with self._condition:
                self._closed = False
                self._condition.notify_all()


class Server:
    """The soak's requests to SGLang."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=STUCK_S)
        info = self.http.get("/v1/loads").raise_for_status().json()["loads"]
        self.capacity = sum(load["max_total_num_tokens"] for load in info)

    def generate(
        self, prompt: Sequence[int], decode: int, envelope: object = None, **members: Any
    ) -> dict[str, Any]:
        """Return one greedy answer."""
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": decode, "ignore_eos": True}
        if envelope is not None:
            sampling["custom_params"] = {"kv_hints": msgspec.to_builtins(envelope)}
        body = {"input_ids": list(prompt), "sampling_params": sampling} | members
        answer = self.http.post("/generate", json=body)
        decoded: dict[str, Any] = answer.raise_for_status().json()
        return decoded

    def record(self, name: str) -> TurnRecord | None:
        """Return the finished record of a message; None if none comes."""
        deadline = time.monotonic() + RECEIPT_S
        while time.monotonic() < deadline:
            answer = self.http.get(RECEIPT_PATH.format(message_id=name))
            if answer.status_code == httpx.codes.OK:
                record = msgspec.json.decode(answer.content, type=TurnRecord)
                if record.finished:
                    return record
            time.sleep(0.02)
        return None

    def load(self) -> tuple[int, int]:
        """Return the number of requests that run or wait, and of tokens that are locked."""
        loads = self.http.get("/v1/loads").raise_for_status().json()["loads"]
        requests = sum(each["num_running_reqs"] + each["num_waiting_reqs"] for each in loads)
        return requests, sum(each["num_used_tokens"] for each in loads)

    def wait_idle(self) -> tuple[int, int]:
        """Return the load when nothing is under way any more, or after a minute."""
        deadline = time.monotonic() + STUCK_S
        while (load := self.load()) != (0, 0) and time.monotonic() < deadline:
            time.sleep(0.1)
        return load


class Session:
    """One conversation that takes random turns."""

    def __init__(self, number: int, seed: int, server: Server, tally: Tally) -> None:
        self._rng = Random(f"{seed} {number}")
        self._name = f"soak {seed} {number}"
        self._server = server
        self._tally = tally
        self._kept: list[Kept] = []
        self._turns = 0
        self._shared = [10 + i for i in range(ATTENTION_SINK + 20)]

    def _text(self, length: int) -> list[int]:
        return [self._rng.randrange(10, 400) for _ in range(length)]

    def take_turn(self) -> None:
        """Take an opening, an append, an edit or a branch; sometimes the client hangs up."""
        self._turns += 1
        turn, name = str(self._turns), f"{self._name} {self._turns} {time.monotonic_ns()}"
        if not self._kept or len(self._kept[-1].tokens) > LONGEST or self._rng.random() < 0.04:
            self._kept = []
            payload = EditPayload(session=self._name, scope=SCOPE, turn=turn)
            prompt = self._shared + self._text(self._rng.randint(80, 240))
        else:
            prompt, payload = self._go_on(turn)
        decode = self._rng.choice([2, 8, 40])
        envelope = edit_envelope(name, payload)
        if self._rng.random() < 0.08:
            self._hang_up(prompt, envelope, name)
            return
        answer = self._server.generate(prompt, decode, envelope)["output_ids"]
        record = self._server.record(name)
        if record is None:
            self._tally.add("missing_receipts")
            self._kept = []
            return
        self._tally.receipt(record)
        lineage = record.receipt.lineage
        if not lineage:
            self._compare(prompt, answer)
        if record.receipt.turn:
            self._kept = [*self._kept[1 - BRANCHES :], Kept(turn, [*prompt, *answer], lineage)]

    def _go_on(self, turn: str) -> tuple[list[int], EditPayload]:
        """Return the next prompt, from the last turn or an earlier one, edited or not."""
        base = self._kept[-1]
        if self._rng.random() < 0.2:
            base = self._rng.choice(self._kept)
            self._tally.add("branches")
        cuts: list[Directive] = []
        if self._rng.random() < 0.75 and len(base.tokens) > ATTENTION_SINK + 20:
            places = self._rng.sample(
                range(ATTENTION_SINK, len(base.tokens)), 2 * self._rng.randint(1, 3)
            )
            ends = sorted(places)
            cuts = [
                Directive(a, b, tuple(self._text(self._rng.choice([0, 0, 3, 70]))))
                for a, b in zip(ends[::2], ends[1::2], strict=True)
            ]
            self._tally.add("edits")
        source = SourceRef(base.name, len(base.tokens), token_digest(token_array(base.tokens)))
        payload = EditPayload(
            session=self._name,
            scope=SCOPE,
            turn=turn,
            sources=(source,) if cuts else (),
            directives=tuple(cuts),
            lineage=base.lineage,
        )
        return apply_directives(base.tokens, cuts) + self._text(self._rng.randint(1, 40)), payload

    def _hang_up(self, prompt: list[int], envelope: object, name: str) -> None:
        """Abort the request some time after it was sent."""
        self._tally.add("aborts")
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self._server.generate, prompt, 200, envelope, rid=name)
            time.sleep(self._rng.random() * 0.3)
            while not answer.done():
                self._server.http.post("/abort_request", json={"rid": name}).raise_for_status()
                time.sleep(0.1)
            with suppress(httpx.HTTPStatusError):  # one that was still waiting ends with an error
                answer.result()

    def _compare(self, prompt: list[int], answer: list[int]) -> None:
        """Compare an answer with that of the same prompt, computed from nothing."""
        again = self._server.generate(
            prompt,
            len(answer),
            cache_salt=f"{self._name} {self._turns} alone",
            return_logprob=True,
            top_logprobs_num=2,
        )
        self._tally.add("compared")
        for position, (token, other) in enumerate(zip(answer, again["output_ids"], strict=True)):
            if token != other:
                first, second = again["meta_info"]["output_top_logprobs"][position][:2]
                tie = first[0] - second[0] < TIE and token in {first[1], second[1]}
                self._tally.add("ties" if tie else "mismatches")
                return


class Soak:
    """The sessions of a run, side by side, and the watch over their server.

    Args:
        step: called after each turn.
    """

    def __init__(self, server: Server, given: argparse.Namespace, step: Step) -> None:
        self._server, self._given, self._step = server, given, step
        self._tally, self._gate = Tally(), Gate()
        self._began = time.monotonic()
        self._left = threading.Semaphore(given.turns)
        self._over = threading.Event()

    def run(self) -> dict[str, Any]:
        """Run all sessions to their end; returns the figures."""
        watcher = threading.Thread(target=self._watch, daemon=True)
        watcher.start()
        with ThreadPoolExecutor(self._given.sessions) as pool:
            for done in [pool.submit(self._talk, n) for n in range(self._given.sessions)]:
                done.result()
        self._over.set()
        watcher.join()
        return self._figures(*self._server.wait_idle())

    def _talk(self, number: int) -> None:
        tally, until = self._tally, self._began + self._given.seconds
        session = Session(number, self._given.seed, self._server, tally)
        while time.monotonic() < until and self._left.acquire(blocking=False):
            with self._gate:
                try:
                    session.take_turn()
                except httpx.TimeoutException:
                    tally.add("stuck")
                except httpx.HTTPError as error:
                    tally.add(f"failed: {type(error).__name__}")
            tally.add("turns")
            self._step()

    def _watch(self) -> None:
        flushed = time.monotonic()
        while not self._over.wait(0.25):
            self._tally.load(*self._server.load())
            if time.monotonic() - flushed > self._given.flush_every:
                self._gate.alone(self._flush)
                flushed = time.monotonic()

    def _flush(self) -> None:
        if self._server.wait_idle() != (0, 0):
            self._tally.add("leaks")
        self._server.http.post("/flush_cache").raise_for_status()
        self._tally.add("flushes")

    def _figures(self, requests: int, locked: int) -> dict[str, Any]:
        tally = self._tally
        failed = sum(count for name, count in tally.counts.items() if name.startswith("failed"))
        bad = ("stuck", "leaks", "mismatches", "missing_receipts")
        return {
            "seconds": round(time.monotonic() - self._began, 1),
            "sessions": self._given.sessions,
            "seed": self._given.seed,
            "counts": dict(sorted(tally.counts.items())),
            "reasons": dict(tally.reasons.most_common()),
            "tokens": dict(tally.tokens),
            "pool": {
                "capacity": self._server.capacity,
                "peak_locked": tally.peak_locked,
                "peak_requests": tally.peak_requests,
                "locked_in_the_end": locked,
                "requests_in_the_end": requests,
            },
            "passed": not (failed or requests or locked or any(tally.counts[n] for n in bad)),
        }


def main() -> int:
    """Run, print, write; returns 1 if anything was wrong."""
    parser = Arguments(__doc__, required=True)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="a server that is idle")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--turns", type=int, default=2000, help="of all sessions together")
    parser.add_argument("--seconds", type=float, default=1800, help="stop after these")
    parser.add_argument("--flush-every", type=float, default=60, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with progress("turns", given.turns) as step:
        result = Soak(Server(given.url), given, step).run()
    return report(given.json, result, passed=result["passed"])
