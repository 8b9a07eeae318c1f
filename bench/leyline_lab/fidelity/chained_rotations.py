"""The rounding error of spliced keys by the number of edits that moved them. No model takes part.

Tokens are spliced again and again through the replay engine's KV pool, each edit moving them by a
random distance. The pool turns each key from the position where it was computed. Beside it is the
naive way: the rounded key that the last splice left is turned again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from leyline_engine.rotary.rotation import Pairing, Rotary
from leyline_lab.fidelity.experiment import (
    Chart,
    Record,
    ResultTable,
    Scale,
)
from leyline_replay.cache.pool import KVLayout, KVPool
from leyline_replay.cache.slots import Slots

EDITS = (1, 10, 100, 1000)
"""Numbers of chained edits in the table."""
_QUICK_EDITS = EDITS[:3]
TOKENS = 64
_COMPUTED_AT = 4000
_FARTHEST = 200
"""Largest number of tokens that one edit inserts or deletes."""
_FIRST, _LAST = 32, 30_000
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_WAYS = ("leyline", "naive")


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


class ChainedRotations:
    """One case is a form of keys, a dtype, a way of turning them, and a number of edits."""

    name = "chained_rotations"
    title = "Chained edits"

    def cases(self, scale: Scale) -> Sequence[str]:
        """Return chains up to 100 edits, or up to 1,000."""
        longest = max(_QUICK_EDITS if scale is Scale.QUICK else EDITS)
        return [
            f"{shape}/{dtype}/{way}/{edits}"
            for edits in sorted({max(_QUICK_EDITS), longest})
            for shape in SHAPES
            for dtype in _DTYPES
            for way in _WAYS
        ]

    def measure(self, case: str) -> Record:
        """Return the largest error so far after each number of edits, as a share of its pair."""
        shape, dtype, way, edits = case.split("/")
        errors = np.maximum.accumulate(
            _chain(SHAPES[shape], _DTYPES[dtype], int(edits), naive=way == "naive")
        )
        return {str(count): float(errors[count - 1]) for count in EDITS if count <= len(errors)}

    def table(self, records: Mapping[str, Record]) -> ResultTable:
        """Return a row for each form, dtype and way."""
        longest: dict[tuple[str, str, str], Record] = {}
        for case, record in records.items():
            shape, dtype, way, _ = case.split("/")
            before = longest.get((shape, dtype, way), {})
            longest[shape, dtype, way] = max(before, record, key=len)
        counts = sorted({int(count) for record in longest.values() for count in record})
        rows = tuple(
            (*key, *(record.get(str(count)) for count in counts)) for key, record in longest.items()
        )
        growth = {
            way: max(
                (
                    float(record[str(counts[-1])] or 0) / float(record["1"] or 1)
                    for (_, dtype, how), record in longest.items()
                    if how == way and dtype == "bfloat16" and str(counts[-1]) in record
                ),
                default=0.0,
            )
            for way in _WAYS
        }
        most = counts[-1] if counts else 0
        return ResultTable(
            title=self.title,
            question="Do rounding errors add up if the same keys are moved by many edits?",
            columns=("keys", "dtype", "way", *(f"{count:,} edits" for count in counts)),
            rows=rows,
            finding=(
                f"No: after {most:,} edits in bf16, the largest error is {growth['leyline']:.1f} "
                "times that of one, as each key is turned from where it was computed. Turning the "
                f"rounded key again gives {growth['naive']:.0f} times."
            ),
            paper="Appendix F, table 6: drift of chained bf16 rotations grows sub-linearly.",
            chart=Chart(
                kind="line",
                x_label="chained edits",
                y_label="largest error, share of the pair's length",
                x=tuple(counts),
                series={
                    ", ".join(key): tuple(_number(record.get(str(count))) for count in counts)
                    for key, record in longest.items()
                },
            ),
        )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _fresh_pool(shape: Shape, dtype: torch.dtype) -> tuple[KVPool, Slots]:
    """Return a pool of one layer, and the slots of random tokens that were computed in it."""
    pool_class, first, second, turning = shape.layout
    width = shape.rotary_dim
    layout = KVLayout(pool_class, ((first, second),), turning, 0, width, dtype)
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    pool = KVPool(layout, 3 * TOKENS, Rotary(inv_freq, shape.pairing), torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    one, other = (torch.randn(TOKENS, *size, generator=generator) for size in (first, second))
    origin = np.arange(TOKENS, dtype=np.int64)
    pool.write(origin, _COMPUTED_AT, [(one.to(dtype), other.to(dtype))])
    return pool, origin


def _pairs(pool: KVPool, slots: Slots) -> torch.Tensor:
    """Return the rotated pairs of the stored keys as complex numbers ``[T, heads, d/2]``."""
    band = pool.read(0, slots)[pool.layout.rotary_tensor].double()
    if pool.rotary.pairing is Pairing.INTERLEAVED:
        return torch.complex(band[..., 0::2].contiguous(), band[..., 1::2].contiguous())
    return torch.complex(*(half.contiguous() for half in band.chunk(2, dim=-1)))


def _turned(pool: KVPool, keys: torch.Tensor, start: int) -> torch.Tensor:
    """Turn ``keys`` as computed, in fp64 by the model's fp32 angles, to ``start…``."""
    rows = torch.arange(TOKENS, dtype=torch.float32)[:, None]
    to, away = ((rows + place) * pool.rotary.at(0).inv_freq for place in (start, _COMPUTED_AT))
    angles = (to.double() - away.double())[:, None, :]
    return keys * torch.polar(torch.ones_like(angles), angles)


def _places(edits: int) -> list[int]:
    """Return the places of the tokens after each edit."""
    steps = np.random.default_rng(3).integers(-_FARTHEST, _FARTHEST + 1, edits)
    place, places = _COMPUTED_AT, []
    for step in steps.tolist():
        place = min(max(place + step, _FIRST), _LAST)
        places.append(place)
    return places


def _chain(shape: Shape, dtype: torch.dtype, edits: int, *, naive: bool) -> list[float]:
    """Return the largest error after each edit, as a share of the length of its pair."""
    pool, origin = _fresh_pool(shape, dtype)
    computed = _pairs(pool, origin)
    source, errors = origin, []
    for index, start in enumerate(_places(edits)):
        target = np.arange(TOKENS, 2 * TOKENS) + index % 2 * TOKENS
        pool.copy(source, target, start)
        if naive:  # moved keys pass for computed where they are
            pool.write(target, start, [pool.read(0, target)])
        truth = _turned(pool, computed, start)
        apart = torch.view_as_real(_pairs(pool, target) - truth).abs().amax(-1)
        errors.append(float((apart / truth.abs()).max()))
        source = target
    return errors
