"""Runs ``leyline bench three-arm`` for sizes of page and KV dtypes, and writes one table of them.

A cell is a server of its own. Its figures come from one run, in which the arms alternate: compare
the ratios.

    OMP_NUM_THREADS=1 .venv/bin/python bench/cells.py --json docs/results/three-arm.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PAGES = (1, 16, 64, 128)
KV_DTYPES = ("auto", "bfloat16", "fp8_e4m3")


def measure(page: int, kv_dtype: str, options: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return the document of one cell.

    Raises:
        CalledProcessError: it doesn't run.
    """
    out = folder / "cell.json"
    cell = (f"--page-size={page}", f"--kv-cache-dtype={kv_dtype}", f"--json={out}")
    command = (Path(sys.executable).with_name("leyline"), "bench", "three-arm", *cell, *options)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def rows(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown: splice and floor by cell, concurrency and phase."""
    yield (
        "| page | KV | at once | request | staged | splice, ms | floor, ms | ratio "
        "| bound, ms | met | radix, ms |"
    )
    yield "| ---: | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | --- | ---: |"
    for cell in cells:
        for concurrency, level in cell["levels"].items():
            for phase, figures in (("edit", level["edit"]), ("replay", level)):
                splice = figures["splice"]["ttft_ms"]["p50"]
                floor, goal = figures["floor"], figures["goal"]["ttft_to_floor"]
                yield (
                    f"| {cell['page']} | {level['kv_dtype']} | {concurrency} | {phase} | "
                    f"{floor['must_prefill']['staged']:g} | {splice:.0f} | "
                    f"{floor['ttft_ms']['p50']:.0f} | {splice / floor['ttft_ms']['p50']:.2f} | "
                    f"{goal['bound']:.0f} | {'yes' if goal['met'] else 'no'} | "
                    f"{figures['radix']['ttft_ms']['p50']:.0f} |"
                )


def main() -> None:
    """Run the cells, and write what was measured after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="file for the figures")
    parser.add_argument("--pages", default=",".join(map(str, PAGES)))
    parser.add_argument("--kv-dtypes", default=",".join(KV_DTYPES))
    arguments, options = parser.parse_known_args()
    options = options or ["--concurrency=1,4", "--samples=24", "--arms=radix,splice"]
    cells: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for kv_dtype in arguments.kv_dtypes.split(","):
            for page in map(int, arguments.pages.split(",")):
                levels = measure(page, kv_dtype, options, Path(folder))
                cells.append({"page": page, "kv_cache_dtype": kv_dtype, "levels": levels})
                document = {"options": options, "cells": cells}
                arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write("\n".join(rows(cells)) + "\n")


if __name__ == "__main__":
    main()
