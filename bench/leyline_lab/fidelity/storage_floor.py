"""The least error that keys stored in bf16 can have after a move, by position and distance.

A key that is rounded when it is stored can't be exact after a rotation. The floor is the error of
rounding alone; the engine's rotation is compared with it. No model takes part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
import torch

from leyline_engine.rotary.rotation import Rotary
from leyline_lab.fidelity.experiment import (
    Chart,
    Record,
    ResultTable,
    Scale,
)
from leyline_lab.fidelity.rotary_models import MODELS, RotaryModel
from leyline_lab.fidelity.rotary_sweep import distance, library_frequencies, rope

POSITIONS = (0, 100, 1000, 10_000, 100_000)
DELTAS = (1, 10, 100, 1000, 10_000)
_SEEDS = {Scale.QUICK: 2, Scale.FULL: 20}
_KEYS = 32
_MODEL = next(model for model in MODELS if model.name == "DeepSeek-V3.2")


class StorageFloor:
    """One case is a position, a distance, and a seed, with the rotary of DeepSeek-V3.2."""

    name = "storage_floor"
    title = "Storage in bf16"

    def cases(self, scale: Scale) -> Sequence[str]:
        """Return all positions and distances with each seed."""
        return [
            f"{position}/{delta}/{seed}"
            for seed in range(_SEEDS[scale])
            for position in POSITIONS
            for delta in DELTAS
        ]

    def measure(self, case: str) -> Record:
        """Return relative L2 errors: of rounding once, and of the rotated key."""
        position, delta, seed = map(int, case.split("/"))
        plain = np.random.default_rng(seed).standard_normal((_KEYS, _MODEL.dim))
        rotary = Rotary(library_frequencies(_MODEL), _MODEL.pairing)
        # Angles as the model has them, so that nothing but storage is measured.
        here, there = (_exact(plain, rotary, _MODEL, at) for at in (position, position + delta))
        stored = here.to(torch.bfloat16)
        places = [torch.full((_KEYS,), at) for at in (position, position + delta)]
        turned = rotary.rotate(stored[:, None], *places)[:, 0]
        return {
            "floor": distance(there.to(torch.bfloat16), there),
            "rotated": distance(turned, there),
            "naive": distance(stored, there),
        }

    def table(self, records: Mapping[str, Record]) -> ResultTable:
        """Return a row for each distance: means, and the worst position."""
        by_delta: dict[int, list[Record]] = {}
        by_place: dict[tuple[int, int], list[float]] = {}
        for case, record in records.items():
            position, delta, _ = map(int, case.split("/"))
            by_delta.setdefault(delta, []).append(record)
            by_place.setdefault((position, delta), []).append(float(record["rotated"] or 0))

        def mean(records: Sequence[Record], key: str) -> float:
            return fmean(float(record[key] or 0) for record in records)

        rows = tuple(
            (
                delta,
                mean(mine, "floor"),
                mean(mine, "rotated"),
                max(fmean(by_place[place]) for place in by_place if place[1] == delta),
                mean(mine, "naive"),
            )
            for delta, mine in sorted(by_delta.items())
        )
        ratio = max((row[2] / row[1] for row in rows), default=0.0)
        return ResultTable(
            title=self.title,
            question="How much of a moved key's error comes from storing keys in bf16 at all?",
            columns=("tokens moved", "rounded once", "rotated", "worst position", "not rotated"),
            rows=rows,
            finding=(
                f"A moved key's error is {ratio:.2f} times that of a key that was rounded once, at "
                "every distance and position: it is rounded when it is stored, and again after "
                "its rotation. The square root of two is the least that this allows."
            ),
            paper="Appendix F: the per-rotation bound in bf16.",
            chart=Chart(
                kind="line",
                x_label="tokens moved",
                y_label="relative L2 error",
                x=tuple(row[0] for row in rows),
                series={
                    "rounded once": tuple(row[1] for row in rows),
                    "rotated": tuple(row[2] for row in rows),
                },
            ),
        )


def _exact(
    plain: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    rotary: Rotary,
    model: RotaryModel,
    position: int,
) -> torch.Tensor:
    """Return keys at a position in float64, by the model's fp32 angles."""
    angles = rotary.angles(torch.tensor([position]))[0].numpy()
    return torch.from_numpy(rope(plain, angles, 1, model.pairing))
