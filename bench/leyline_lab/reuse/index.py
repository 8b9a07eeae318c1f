"""The cost of an index that only recalls use: time per turn, memory, and the time of a recall.

A session without general reuse grows by NEW tokens per turn, in the replay engine's own records:
its tree, its registry and its index, without a model. Each turn is indexed as in the engine: its
prompt when it is computed, and all of it when it ends. Then turns put RECALLED tokens of its
beginning back at its end. Times are of the CPU.
"""

from __future__ import annotations

import tracemalloc
from array import array
from collections.abc import Callable
from functools import partial
from statistics import median
from time import thread_time

import numpy as np

from leyline_engine.contract import EditPayload, ReuseMode, ReusePayload
from leyline_engine.records.retention import source_of
from leyline_engine.records.sources import SourceTurn
from leyline_replay.admission import Admission
from leyline_replay.dry_run import DryCache, Found

from ..console import write_json
from ..harness.arguments import Arguments, numbers
from ..harness.report import show

VOCABULARY = 128_000
INDEX = ReusePayload(mode=ReuseMode.LIVE, within=())
OUTPUT = array("q", [1])


class Records(DryCache):
    """An engine's records, which index each turn as an engine does.

    Args:
        tokens: size of the pool.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__(tokens=tokens)
        self.spent = 0.0
        """Seconds that the index took of the last turn."""
        retained = self._admitter.retained
        self._admitter.retained = lambda source: self._timed(  # type: ignore[method-assign]
            lambda: retained(source)
        )
        registry = self._cache.registry
        dropped = registry.dropped
        registry.dropped = lambda turn, left: self._timed(lambda: dropped(turn, left))
        self._running: list[SourceTurn] = []

    def run(self, number: int, tokens: array[int], reuse: ReusePayload | None) -> Found:
        """Serve a turn from its admission to its end."""
        self.spent = 0.0
        payload = EditPayload(session="s", scope="t", turn=f"t{number}")
        found = self.serve(tokens, OUTPUT, payload, reuse)
        for prompt in self._running:
            self._timed(partial(self._admitter.ended, prompt))
        self._running.clear()
        return found

    def entries(self) -> int:
        """Return the number of entries in the index."""
        index = self._cache.reuse
        return len(index) if index is not None else 0

    def _publish(
        self, admission: Admission, prompt: array[int], output: array[int], payload: EditPayload
    ) -> None:
        super()._publish(admission, prompt, output, payload)

        def source() -> SourceTurn:
            return source_of(("t", "s"), payload.turn, prompt, lineage=(), spans=())

        def computed() -> None:
            indexed = self._admitter.computed("t", source)
            self._running += [indexed] if indexed is not None else []

        self._timed(computed)

    def _timed(self, work: Callable[[], object]) -> None:
        began = thread_time()
        work()
        self.spent += thread_time() - began


def prompts(length: int, new: int, turns: int) -> list[array[int]]:
    """Return the prompts of a session whose last one has ``length`` tokens."""
    ids = np.random.default_rng(1).integers(0, VOCABULARY, length)
    return [array("q", ids[: length - new * left].tolist()) for left in reversed(range(turns))]


def memory(length: int, reuse: ReusePayload | None) -> tuple[int, int]:
    """Return the bytes that a turn leaves in the records, and its entries in the index."""
    prompt = prompts(length, 0, 1)[0]
    records = Records(3 * length)
    # What the index has once, whatever its sessions are, is there after another turn.
    records.run(0, prompt[::-1], reuse)
    before = records.entries()
    tracemalloc.start()
    records.run(1, prompt, reuse)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held, records.entries() - before


def measure(length: int, new: int, recalled: int, repeat: int) -> dict[str, float]:
    """Return the costs of a session whose last prompt has ``length`` tokens."""
    records, spent = Records(3 * length), list[float]()
    for number, prompt in enumerate(prompts(length, new, repeat + 1)):
        records.run(number, prompt, INDEX)
        spent.append(records.spent)
    times = {True: list[float](), False: list[float]()}
    for number in range(2 * repeat):
        # A token of its own keeps a prompt from being a prefix of the next.
        tokens = prompt + array("q", [number]) + prompt[100 : 100 + recalled] + array("q", [7])
        within = ((length + 1, length + 1 + recalled),)
        recalls = number % 2 == 1
        asked = ReusePayload(mode=ReuseMode.LIVE, own=True, within=within) if recalls else INDEX
        began = thread_time()
        found = records.run(repeat + 1 + number, tokens, asked)
        times[recalls].append(thread_time() - began)
        if recalls and (found.reuse is None or found.reuse.extents != within):
            raise SystemExit(f"the text was not recalled: {found.reuse}")
    indexed, entries = memory(length, INDEX)
    return {
        "first_ms": round(1e3 * spent[0], 2),
        "turn_ms": round(1e3 * median(spent[1:]), 2),
        "recall_ms": round(1e3 * (median(times[True]) - median(times[False])), 2),
        "entries": entries,
        "kilobytes": round((indexed - memory(length, None)[0]) / 1024),
    }


def main() -> None:
    """Measure each size, print, write."""
    parser = Arguments(__doc__)
    parser.add_argument("--sizes", type=numbers, default="10000,50000,100000", help="in tokens")
    parser.add_argument("--new", type=int, default=1000, help="tokens that each turn adds")
    parser.add_argument("--recalled", type=int, default=2000, help="tokens of a recall")
    parser.add_argument("--repeat", type=int, default=8)
    given = parser.parse_args()
    found = {size: measure(size, given.new, given.recalled, given.repeat) for size in given.sizes}
    names = ("first_ms", "turn_ms", "recall_ms")
    rows = [
        (
            f"{size:,}",
            *(f"{row[name]:.2f} ms" for name in names),
            *(f"{row['entries']:,}", f"{row['kilobytes']:,} KB"),
        )
        for size, row in found.items()
    ]
    show(("prompt", "first turn", "each turn", "a recall", "entries", "memory"), rows)
    write_json(given.json, found)
