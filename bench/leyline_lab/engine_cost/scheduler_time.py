"""The time that Leyline's planning and bookkeeping take on SGLang's scheduler, rows excluded.

A scheduler without a model serves one session's turns: SGLang's own tree, pools, requests and
admission, with Leyline's on top; see :mod:`.scheduler.driver`. The same turns without edits run on
SGLang as it is: their time is the floor. A step is one pass of the scheduler's loop, without the
forward. All times are CPU time.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import count
from statistics import median
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray

from leyline_engine.contract import LineageRun, Mode, ReuseMode, ReusePayload
from leyline_engine.records.lineage import fold_keys
from leyline_engine.records.publications import Publication, Publications

from ..console import write_json
from ..harness.arguments import Arguments, numbers
from ..harness.report import show
from ..harness.statistics import percentile
from .scheduler.driver import VOCABULARY, Driver, prepare_sglang
from .scheduler.talk import SCOPE, Talk

Ids = NDArray[np.int64]
BOUND_MS = 10.0
"""One decode step of a large model: no step may take longer."""
_BRANCHES, _SESSIONS = 31, 256
_SHORT = 2_000
"""Tokens of the other sessions' paths."""
_WAITING = 8


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of one kind, in milliseconds of scheduler time."""

    kind: str
    page: int
    tokens: int
    steps: float
    """Median number of steps per turn."""
    p50_ms: float
    """Of a turn's steps together."""
    p99_ms: float
    longest_p50_ms: float
    """Of the longest step of each turn."""
    longest_ms: float
    """The longest step of all."""
    parts_ms: dict[str, float]
    """Medians by part of a step."""


Turning = tuple[str, Callable[[], None]]
"""The name of a kind of turn, and what serves one."""


@dataclass(frozen=True, slots=True)
class Calls:
    """One thing that was done many times, in milliseconds."""

    what: str
    tokens: int
    p50_ms: float
    p99_ms: float
    max_ms: float


def _measure(driver: Driver, tokens: int, repeat: int, turns: Turning, *, warm: int = 3) -> Turns:
    """Measure turns; the first ``warm`` don't count."""
    kind, turn = turns
    totals, longest, steps = [], [], []
    parts: dict[str, list[float]] = {}
    gc.collect()
    for number in range(warm + repeat):
        driver.watch.clear()
        turn()
        if number < warm:
            continue
        every = [ns / 1e6 for ns in driver.watch.step_ns]
        totals.append(sum(every))
        longest.append(max(every))
        steps.append(len(every))
        for name, spent in driver.watch.part_ns.items():
            parts.setdefault(name, []).append(spent / 1e6)
    return Turns(
        kind,
        driver.page,
        tokens,
        median(steps),
        round(median(totals), 3),
        round(percentile(totals, 0.99), 3),
        round(median(longest), 3),
        round(max(longest), 3),
        {name: round(median(values), 3) for name, values in parts.items()},
    )


class Bench:
    """Turns of one length on pages of one size."""

    def __init__(self, tokens: int, page: int, repeat: int) -> None:
        self.tokens, self.page, self.repeat = tokens, page, repeat

    def _driver(self, *, leyline: bool = True) -> Driver:
        longest = self.tokens + 64 * 1024
        return Driver(8 * longest, longest, page=self.page, leyline=leyline)

    def _talk(self, driver: Driver, name: str = "s") -> Talk:
        talk = Talk(name, self.tokens, crc32(name.encode()), VOCABULARY)
        record = driver.serve(talk.prompt(), talk.opens())
        talk.answered([7], record.receipt.lineage if record is not None else ())
        return talk

    def stock(self) -> Turns:
        """Turns on SGLang as it is; each adds a message."""
        driver = self._driver(leyline=False)
        talk = self._talk(driver)

        def turn() -> None:
            talk.appends()
            driver.serve(talk.prompt())
            talk.answered([7], ())

        return _measure(driver, self.tokens, self.repeat, ("stock", turn))

    def appends(self, *, reuse: bool = False, spliced: bool = False) -> Turns:
        """Turns that edit nothing."""
        driver = self._driver()
        talk = self._talk(driver)
        asked = ReusePayload(mode=ReuseMode.LIVE) if reuse else None
        if spliced:
            self._edited(driver, talk, 1, Mode.AMORTIZE, None)

        def turn() -> None:
            payload = talk.appends()
            record = driver.serve(talk.prompt(), payload, reuse=asked)
            assert record is not None
            talk.answered([7], record.receipt.lineage)

        kind = "append, reuse" if reuse else "append, spliced" if spliced else "append"
        return _measure(driver, self.tokens, self.repeat, (kind, turn))

    def _edited(
        self, driver: Driver, talk: Talk, count: int, mode: Mode, asked: ReusePayload | None
    ) -> None:
        payload = talk.edits(count, mode)
        record = driver.serve(talk.prompt(), payload, reuse=asked)
        assert record is not None
        spliced = record.receipt.tokens.spliced > self.tokens // 4
        assert spliced is (mode is Mode.AMORTIZE), record.receipt
        talk.answered([7], record.receipt.lineage)

    def edits(self, cuts: int, *, reuse: bool = False) -> Turns:
        """Turns that shorten ``cuts`` messages, of a session that has many branches."""
        driver = self._driver()
        talk = self._talk(driver)
        asked = ReusePayload(mode=ReuseMode.LIVE) if reuse else None

        def turn() -> None:
            self._edited(driver, talk, cuts, Mode.AMORTIZE, asked)

        kind = f"edit {cuts}" + (", reuse" if reuse else "")
        return _measure(driver, self.tokens, self.repeat, (kind, turn), warm=_BRANCHES)

    def firsts(self) -> Turns:
        """First edits of sessions."""
        driver = self._driver()
        talks = iter([self._talk(driver, f"s{number}") for number in range(3)])
        return _measure(
            driver,
            self.tokens,
            3,
            ("first edit", lambda: self._edited(driver, next(talks), 1, Mode.AMORTIZE, None)),
            warm=0,
        )

    def forgets(self, branches: int) -> Turns:
        """Turns that forget a message, after as many edited ones as the session has branches."""
        driver = self._driver()
        turns = 3

        def turn() -> None:
            talk = self._talk(driver, f"f{next(names)}")
            for _ in range(branches):
                self._edited(driver, talk, 1, Mode.AMORTIZE, None)
            driver.watch.clear()
            self._edited(driver, talk, 1, Mode.FORGET, None)

        names = count()
        kind = f"forget, {branches} branches"
        return _measure(driver, self.tokens, turns, (kind, turn), warm=1)

    def waiting(self) -> Calls:
        """Passes over prompts that wait for memory, per prompt."""
        driver = self._driver()
        talks = [self._talk(driver, f"w{number}") for number in range(2)]
        for talk in talks:
            self._edited(driver, talk, 1, Mode.AMORTIZE, None)
        reqs = []
        for number in range(_WAITING):
            talk = talks[number % len(talks)]
            payload = talk.edits(1)
            reqs.append(driver.submit(talk.prompt(), payload))
        spent = []
        for _ in range(self.repeat):
            began = time.thread_time_ns()
            for req in reqs:
                req.init_next_round_input(driver.cache)
            spent.append((time.thread_time_ns() - began) / 1e6 / len(reqs))
        return _calls("a waiting prompt, per pass", self.tokens, spent)


def _calls(what: str, tokens: int, spent: list[float]) -> Calls:
    return Calls(
        what,
        tokens,
        round(median(spent), 4),
        round(percentile(spent, 0.99), 4),
        round(max(spent), 4),
    )


class Notes:
    """An index of published paths with many sessions and branches.

    Args:
        tokens: tokens of the measured session's paths; others are short.
    """

    def __init__(self, tokens: int, repeat: int) -> None:
        self.tokens, self.repeat = tokens, repeat
        self._rng = np.random.default_rng(5)
        self._system = self._ids(1_000)
        self.index = Publications(max_tokens=1 << 30)
        for number in range(_SESSIONS - 1):
            start = np.concatenate([self._system, self._ids(_SHORT // 2)])
            for _ in range(_BRANCHES):
                path = np.concatenate([start, self._ids(_SHORT // 2)])
                self.index.note((SCOPE, f"o{number}"), self._path(path))
        self._start = np.concatenate([self._system, self._ids(tokens - 1_000)])
        self._branch(_BRANCHES)

    def _ids(self, count: int) -> Ids:
        return self._rng.integers(10, VOCABULARY, count)

    def _path(self, ids: Ids, run: int | None = None) -> Publication:
        tokens = array("q", ids.tolist())
        runs = () if run is None else (LineageRun(run, f"l{run}"),)
        return Publication(fold_keys(tokens, runs, SCOPE), runs)

    def _branch(self, count: int) -> None:
        """Add branches of the measured session, which part late."""
        for _ in range(count):
            at = int(self._rng.integers(self.tokens // 2, self.tokens - 10))
            path = np.concatenate([self._start[:at], self._ids(self.tokens - at)])
            self.index.note((SCOPE, "s"), self._path(path))

    def longer(self) -> Calls:
        """Notes of a path that continues the last one."""
        held = self.index.of((SCOPE, "s"))[-1].keys
        spent = []
        for _ in range(self.repeat):
            held = held + array("q", self._ids(100).tolist())
            path = Publication(held)
            began = time.thread_time_ns()
            self.index.note((SCOPE, "s"), path)
            spent.append((time.thread_time_ns() - began) / 1e6)
        return _calls("note, a longer path", self.tokens, spent)

    def another(self) -> Calls:
        """Notes of another branch, for which the oldest one is dropped."""
        self._branch(2)
        spent = []
        for _ in range(self.repeat):
            at = int(self._rng.integers(self.tokens // 2, self.tokens - 10))
            path = self._path(np.concatenate([self._start[:at], self._ids(self.tokens - at)]))
            began = time.thread_time_ns()
            self.index.note((SCOPE, "s"), path)
            spent.append((time.thread_time_ns() - began) / 1e6)
        return _calls("note, another branch", self.tokens, spent)


def _turns_of(tokens: int, page: int, repeat: int) -> list[Turns]:
    bench = Bench(tokens, page, repeat)
    return [
        bench.stock(),
        bench.appends(),
        bench.appends(spliced=True),
        bench.appends(reuse=True),
        bench.firsts(),
        bench.edits(1),
        bench.edits(5),
        bench.edits(1, reuse=True),
        bench.forgets(1),
        bench.forgets(_BRANCHES),
    ]


def _rows(found: list[Turns]) -> Iterator[list[str]]:
    floors = {(t.page, t.tokens): t.p50_ms for t in found if t.kind == "stock"}
    for t in found:
        yield [
            t.kind,
            str(t.page),
            f"{t.tokens:,}",
            f"{t.steps:g}",
            f"{t.p50_ms:.2f}",
            f"{t.p99_ms:.2f}",
            f"{t.p50_ms / floors[t.page, t.tokens]:.1f}",
            f"{t.longest_p50_ms:.2f}",
            f"{t.longest_ms:.2f}" + (" !" if t.longest_ms > BOUND_MS else ""),
        ]


def main() -> None:
    """Measure, print, write."""
    parser = Arguments(__doc__)
    parser.add_argument(
        "--sizes", type=numbers, default="10000,50000,100000", help="tokens of the prompts"
    )
    parser.add_argument("--pages", type=numbers, default="1,64", help="tokens per page")
    parser.add_argument("--repeat", type=int, default=15, help="turns of each kind that count")
    given = parser.parse_args()
    torch.set_num_threads(1)
    prepare_sglang()
    turns = [
        each
        for page in given.pages
        for size in given.sizes
        for each in _turns_of(size, page, given.repeat)
    ]
    columns = ("turn", "page", "tokens", "steps", "p50", "p99", "× stock", "longest step", "worst")
    title = "Turns, CPU milliseconds of the scheduler, rows and forwards excluded"
    show(columns, _rows(turns), title=title)
    calls = [Bench(size, 1, given.repeat).waiting() for size in given.sizes]
    for size in given.sizes:
        notes = Notes(size, given.repeat)
        calls += [notes.longer(), notes.another()]
    rows = [
        (c.what, f"{c.tokens:,}", f"{c.p50_ms:.3f}", f"{c.p99_ms:.3f}", f"{c.max_ms:.3f}")
        for c in calls
    ]
    title = f"Calls; notes beside {_SESSIONS} sessions with {_BRANCHES} branches each"
    show(("what", "tokens", "p50", "p99", "max"), rows, title=title)
    figures = {"turns": list(map(asdict, turns)), "calls": list(map(asdict, calls))}
    write_json(given.json, figures)
