"""The cost to an engine of its levels: the owners of its slots, and the sizes of its records.

The marks beside SGLang's pool are measured if SGLang is installed; all else anywhere. Medians of
CPU time, on one thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from leyline_engine.claims.events import Run
from leyline_engine.contract import SpanLabel
from leyline_engine.occupancy import RegistryLevels, held_by_claims
from leyline_engine.records.ledger import SpanLedger
from leyline_engine.records.lineage import TOKEN_BITS
from leyline_engine.records.sources import SourceRegistry, SourceTurn
from leyline_replay.cache.radix import RadixTree

from ..console import write_json
from ..harness.arguments import Arguments
from ..harness.report import show
from ..harness.statistics import times

REPEATS = 50


def milliseconds(what: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the median time of a call."""
    return round(1e3 * median(times(what, repeats)), 4)


def marks(capacity: int) -> float:
    """Time the sum over a pool's marks, a third of them set."""
    flags = torch.zeros(capacity + 1, dtype=torch.uint8)
    flags[::3] = 1
    return milliseconds(lambda: int(flags.sum()))


def claims(count: int) -> float:
    """Time the union of the pages that claims hold, three runs each."""
    holds = [
        (500, [Run(f"turn{n % 97}", start, start + 400) for start in (n, n + 700, n + 1500)])
        for n in range(count)
    ]
    return milliseconds(lambda: held_by_claims(holds))


def registries() -> float:
    """Time the sizes of a full registry and ledger."""
    registry, ledger = SourceRegistry(), SpanLedger()
    tokens = array("q", range(64))
    for number in range(1024):
        session = ("tenant", f"session{number}")
        ledger.label(session, [f"span{n}" for n in range(64)])
        for turn in range(8):
            spans = (SpanLabel("a", 0, 64),)
            source = SourceTurn(f"t{turn}", tokens, "", (), *session, spans=spans)
            registry.retain(session, source)
    return milliseconds(lambda: RegistryLevels.of(registry, ledger))


def tree(nodes: int, length: int = 100) -> tuple[float, float]:
    """Time what running counts add to the insertion of a node, and what a walk would cost."""
    grown = RadixTree()
    for number in range(nodes):
        fold = (number % 2) << TOKEN_BITS
        keys = array("q", [number, *(fold | n for n in range(1, length))])
        grown.insert(keys, np.arange(length) + number * length, None)
    node = next(grown.nodes())

    def there_and_back() -> None:
        grown._count(node, 1)
        grown._count(node, -1)

    return milliseconds(there_and_back) / 2, milliseconds(grown.check_counts, 5)


def main() -> None:
    """Measure, print, and write the figures."""
    given = Arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    counting, walking = tree(5000)
    figures = {
        "sum over marks, 131,072 slots": marks(131_072),
        "sum over marks, 1,048,576 slots": marks(1 << 20),
        "what 64 claims hold": claims(64),
        "what 4,096 claims hold": claims(4096),
        "8,192 retained turns, 65,536 spans": registries(),
        "replay: a node's count, 100 tokens": round(counting, 4),
        "replay: a walk over 5,000 nodes instead": walking,
    }
    show(("what", "ms"), [(name, f"{value:.4f}") for name, value in figures.items()])
    write_json(given.json, figures)
