"""The effect of a chain of edits on spliced keys: the rounding error by number of edits.

Tokens are spliced again and again through the replay engine's KV pool, each edit moving them by a
random distance. The pool turns each key from the position where it was computed. Beside it is the
naive way: the rounded key that the last splice left is turned again. No model takes part.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from leyline_engine.replay.cache.pool import KVLayout, KVPool
from leyline_engine.replay.cache.slots import Slots
from leyline_engine.rotation import Pairing, Rotary

Results = dict[str, dict[str, Any]]

TOKENS = 64
COMPUTED_AT = 4000  # where the first token was computed
FARTHEST = 200  # tokens that one edit inserts or deletes at most
FIRST, LAST = 32, 30_000  # positions that the tokens stay within
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WAYS = ("leyline", "naive")
SHOWN = (1, 10, 100, 1000)  # edits; the table's columns


@dataclass(frozen=True, slots=True)
class Shape:
    """A model family's form of keys."""

    layout: tuple[str, tuple[int, int], tuple[int, int], int]
    """Pool class, (heads, dim) of the two cached tensors, and the one of them that turns."""
    rotary_dim: int
    pairing: Pairing


SHAPES = {
    "MLA, 64 interleaved": Shape(
        ("mla_latent", (1, 512), (1, 64), 1), rotary_dim=64, pairing=Pairing.INTERLEAVED
    ),
    "GQA, 128 half-split": Shape(
        ("gqa", (4, 128), (4, 128), 0), rotary_dim=128, pairing=Pairing.HALF_SPLIT
    ),
}


def fresh_pool(shape: Shape, dtype: torch.dtype) -> tuple[KVPool, Slots]:
    """Return a pool of one layer, and the slots of random tokens computed at ``COMPUTED_AT``."""
    pool_class, first, second, turning = shape.layout
    width = shape.rotary_dim
    layout = KVLayout(pool_class, 1, (first, second), turning, 0, width, dtype)
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    pool = KVPool(layout, 3 * TOKENS, Rotary(inv_freq, shape.pairing), torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    one, other = (torch.randn(TOKENS, *size, generator=generator) for size in (first, second))
    origin = np.arange(TOKENS, dtype=np.int64)
    pool.write(origin, COMPUTED_AT, [(one.to(dtype), other.to(dtype))])
    return pool, origin


def pairs(pool: KVPool, slots: Slots) -> torch.Tensor:
    """Return the rotated pairs of the stored keys as complex numbers ``[T, heads, d/2]``."""
    band = pool.read(0, slots)[pool.layout.rotary_tensor].double()
    if pool.rotary.pairing is Pairing.INTERLEAVED:
        return torch.complex(band[..., 0::2].contiguous(), band[..., 1::2].contiguous())
    return torch.complex(*(half.contiguous() for half in band.chunk(2, dim=-1)))


def turned(pool: KVPool, keys: torch.Tensor, start: int) -> torch.Tensor:
    """Turn ``keys`` as computed, in fp64 by the model's fp32 angles, to ``start…``."""
    rows = torch.arange(TOKENS, dtype=torch.float32)[:, None]
    to, away = ((rows + place) * pool.rotary.inv_freq for place in (start, COMPUTED_AT))
    angles = (to.double() - away.double())[:, None, :]
    return keys * torch.polar(torch.ones_like(angles), angles)


def random_places(edits: int, seed: int = 3) -> list[int]:
    """Return the places of the tokens after each edit, in steps of at most ``FARTHEST``."""
    steps = np.random.default_rng(seed).integers(-FARTHEST, FARTHEST + 1, edits)
    place, places = COMPUTED_AT, []
    for step in steps.tolist():
        place = min(max(place + step, FIRST), LAST)
        places.append(place)
    return places


def chain(shape: Shape, dtype: torch.dtype, way: str, tick: Callable[[], object]) -> list[float]:
    """Return the largest error after each edit, as a share of the length of its pair."""
    pool, origin = fresh_pool(shape, dtype)
    computed = pairs(pool, origin)
    source, errors = origin, []
    for index, start in enumerate(random_places(max(SHOWN))):
        target = np.arange(TOKENS, 2 * TOKENS) + index % 2 * TOKENS
        pool.copy(source, target, start)
        if way == "naive":  # moved keys pass for computed where they are
            pool.write(target, start, [pool.read(0, target)])
        truth = turned(pool, computed, start)
        apart = torch.view_as_real(pairs(pool, target) - truth).abs().amax(-1)
        errors.append(float((apart / truth.abs()).max()))
        source = target
        tick()
    return errors


def measure(tick: Callable[[], object]) -> Results:
    """Return errors by layout and dtype, one per edit, both ways."""
    return {
        name: {
            dtype: {way: chain(shape, DTYPES[dtype], way, tick) for way in WAYS} for dtype in DTYPES
        }
        for name, shape in SHAPES.items()
    }


def table(results: Results) -> Table:
    """Return the largest error so far, after 1, 10, 100 and 1,000 edits."""
    shown = Table(title="Largest error of a spliced key, as a share of its pair's length")
    for column in ("keys", "dtype", "way", *(f"{edits:,} edits" for edits in SHOWN)):
        shown.add_column(column, justify="right" if "edits" in column else "left")
    for name, by_dtype in results.items():
        for dtype, ways in by_dtype.items():
            for way, errors in ways.items():
                cells = [f"{max(errors[:edits]):.1e}" for edits in SHOWN]
                shown.add_row(name, dtype, way, *cells)
        shown.add_section()
    return shown


def draw(results: Results, out: Path) -> None:
    """Draw the error by number of edits, one panel per layout."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    panels = figure.subplots(1, len(results), sharey=True)
    for axes, (name, by_dtype) in zip(panels, results.items(), strict=True):
        for color, (dtype, ways) in zip(("C0", "C1"), by_dtype.items(), strict=True):
            for way, errors in ways.items():
                worst = np.maximum.accumulate(errors)
                style = "-" if way == "leyline" else "--"
                edits = range(1, len(worst) + 1)
                axes.loglog(edits, worst, style, color=color, label=f"{dtype}, {way}")
        axes.set(xlabel="chained edits", title=name)
        axes.legend()
    panels[0].set_ylabel("largest error, share of the pair's length")
    figure.savefig(out, dpi=150)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--plot", type=Path, metavar="OUT.png")
    given = parser.parse_args()
    console = Console()
    total = len(SHAPES) * len(DTYPES) * len(WAYS) * max(SHOWN)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("edits", total=total)
        results = measure(lambda: progress.advance(task))
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(results) + "\n")
    if given.plot:
        draw(results, given.plot)
    console.width = max(console.width, 100)  # a narrower table can't be read
    console.print(table(results))


if __name__ == "__main__":
    main()
