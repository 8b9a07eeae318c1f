"""Runs ``leyline bench three-arm`` for sizes of page and KV dtypes, and writes one table of them.

A cell is a server of its own. Its figures come from one run, in which the arms alternate: compare
the ratios.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..console import write_json
from ..harness import markdown
from ..harness.arguments import Arguments, numbers, words

PAGES = (1, 16, 64, 128)
KV_DTYPES = ("auto", "bfloat16", "fp8_e4m3")


def measure(page: int, kv_dtype: str, options: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return the document of one cell.

    Raises:
        CalledProcessError: it doesn't run.
    """
    out = folder / "cell.json"
    cell = (f"--page-size={page}", f"--kv-cache-dtype={kv_dtype}", f"--json={out}")
    leyline = (sys.executable, "-P", "-c", "from leyline_proxy.cli import main; main()")
    command = (*leyline, "bench", "three-arm", *cell, *options)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def rows(cells: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield splice and floor by cell, concurrency and phase."""
    for cell in cells:
        for concurrency, level in cell["levels"].items():
            for phase, figures in (("edit", level["edit"]), ("replay", level)):
                splice = figures["splice"]["ttft_ms"]["p50"]
                floor, goal = figures["floor"], figures["goal"]["ttft_to_floor"]
                yield (
                    phase,
                    level["kv_dtype"],
                    "yes" if goal["met"] else "no",
                    f"{cell['page']}",
                    f"{concurrency}",
                    f"{floor['must_prefill']['staged']:g}",
                    f"{splice:.0f}",
                    f"{floor['ttft_ms']['p50']:.0f}",
                    f"{splice / floor['ttft_ms']['p50']:.2f}",
                    f"{goal['bound']:.0f}",
                    f"{figures['radix']['ttft_ms']['p50']:.0f}",
                )


COLUMNS = (
    *("request", "KV", "met", "page", "at once", "staged", "splice, ms", "floor, ms", "ratio"),
    *("bound, ms", "radix, ms"),
)


def main() -> None:
    """Run the cells, and write what was measured after each."""
    parser = Arguments(__doc__, required=True)
    parser.add_argument("--pages", type=numbers, default=",".join(map(str, PAGES)))
    parser.add_argument("--kv-dtypes", type=words, default=",".join(KV_DTYPES))
    given, options = parser.parse_known_args()
    options = options or ["--concurrency=1,4", "--samples=24", "--arms=radix,splice"]
    cells: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        for kv_dtype in given.kv_dtypes:
            for page in given.pages:
                levels = measure(page, kv_dtype, options, Path(folder))
                cells.append({"page": page, "kv_cache_dtype": kv_dtype, "levels": levels})
                write_json(given.json, {"options": options, "cells": cells})
    print(markdown.table(COLUMNS, rows(cells), words=3))
