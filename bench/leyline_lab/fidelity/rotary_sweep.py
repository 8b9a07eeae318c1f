"""Rotated keys against RoPE in float64, over the rotary parameters of current models.

A key that was computed at one position and is needed at another is turned by the engine's rotation.
It is compared with the key that the model itself computes at the new position, in fp32 with the
frequencies of its rotary module, and with RoPE in float64. No weights take part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from leyline_engine.rotary.rotation import Pairing, Rotary
from leyline_lab.fidelity.experiment import (
    Chart,
    Record,
    ResultTable,
    Scale,
)
from leyline_lab.fidelity.rotary_models import MODELS, RotaryModel

_SEEDS = {Scale.QUICK: 1, Scale.FULL: 8}
_KEYS = 16
"""Keys for each pair of positions."""
_PLACES = (0, 1, 17, 1000, 4001, 16_000, 0.5, 0.9)
"""Positions at which keys were computed; below 1, shares of the longest."""
_DELTAS = (-16_000, -4000, -200, -1, 1, 37, 200, 4000, 16_000, 60_000)
_MEASURES = ("rotated", "rotated_bf16", "stored_bf16", "model", "naive")


class RotarySweep:
    """One case is a model and a seed."""

    name = "rotary_sweep"
    title = "Rotation of keys"

    def cases(self, scale: Scale) -> Sequence[str]:
        """Return every model with each seed."""
        return [f"{model.name}/{seed}" for seed in range(_SEEDS[scale]) for model in MODELS]

    def measure(self, case: str) -> Record:
        """Return relative L2 distances: the worst over positions, and the median."""
        name, _, seed = case.rpartition("/")
        model = next(each for each in MODELS if each.name == name)
        found = np.array(_distances(model, int(seed)))
        worst, middle = found.max(axis=0), np.median(found, axis=0)
        return {
            **{f"worst_{key}": float(v) for key, v in zip(_MEASURES, worst, strict=True)},
            **{f"median_{key}": float(v) for key, v in zip(_MEASURES, middle, strict=True)},
        }

    def table(self, records: Mapping[str, Record]) -> ResultTable:
        """Return a row for each model: the worst of all seeds."""
        worst: dict[RotaryModel, list[float]] = {}
        for model in MODELS:
            mine = [record for case, record in records.items() if case.startswith(f"{model.name}/")]
            if mine:
                worst[model] = [
                    max(float(record[f"worst_{key}"] or 0.0) for record in mine)
                    for key in _MEASURES
                ]
        by_measure = dict(zip(_MEASURES, zip(*worst.values(), strict=True), strict=False))
        highest = {key: max(by_measure.get(key, (0.0,))) for key in _MEASURES}
        least = min(by_measure.get("naive", (0.0,)))
        return ResultTable(
            title=self.title,
            question="Is a rotated key the key that the model computes at its new position?",
            columns=(
                "model",
                "rotated dimensions",
                "rotated, fp32",
                "rotated, bf16",
                "stored in bf16 only",
                "the model's own fp32, against float64",
                "naive, not rotated",
            ),
            rows=tuple((model.name, model.dim, *figures) for model, figures in worst.items()),
            finding=(
                f"In fp32, a rotated key differs from the model's own by {highest['rotated']:.1e} "
                f"of its length at most. The model's own key is up to {highest['model']:.1e} away "
                "from RoPE in float64, as its angles are fp32 products; the rotation reproduces "
                "them. In bf16 the difference is that of rounding the key twice. A key that isn't "
                f"rotated is wrong by {least:.2f} to {highest['naive']:.2f}."
            ),
            paper="Appendix H, table 8: worst rel-L2 within bf16 round-off for all configurations.",
            chart=Chart(
                kind="bar",
                x_label="",
                y_label="worst relative L2 distance",
                x=tuple(model.name for model in worst),
                series={
                    "rotated, fp32": tuple(by_measure.get("rotated", ())),
                    "rotated, bf16": tuple(by_measure.get("rotated_bf16", ())),
                    "not rotated": tuple(by_measure.get("naive", ())),
                },
            ),
        )


def _distances(model: RotaryModel, seed: int) -> list[tuple[float, ...]]:
    """Return the distances of :data:`_MEASURES` for each pair of positions."""
    rotary = Rotary(library_frequencies(model), model.pairing)
    exact = model.frequencies()
    generator = np.random.default_rng(seed)
    found: list[tuple[float, ...]] = []
    for computed_at, needed_at in _moves(model):
        plain = generator.standard_normal((_KEYS, model.dim))
        here, there = (_as_model(plain, rotary, at) for at in (computed_at, needed_at))
        truth = rope(plain, exact, needed_at, model.pairing)
        places = [torch.full((_KEYS,), at, dtype=torch.int64) for at in (computed_at, needed_at)]
        turned = rotary.rotate(here[:, None], *places)[:, 0]
        stored = here.to(torch.bfloat16)
        turned_bf16 = rotary.rotate(stored[:, None], *places)[:, 0]
        found.append(
            (
                distance(turned, there),
                distance(turned_bf16, there),
                distance(there.to(torch.bfloat16), there),
                distance(there, torch.from_numpy(truth)),
                distance(here, there),
            )
        )
    return found


def _moves(model: RotaryModel) -> list[tuple[int, int]]:
    """Return pairs of positions within the model's context."""
    places = {int(place * model.longest) if 0 < place < 1 else int(place) for place in _PLACES}
    pairs = [(place, place + delta) for place in sorted(places) for delta in _DELTAS]
    return [(here, there) for here, there in pairs if 0 <= there < model.longest]


def library_frequencies(model: RotaryModel) -> torch.Tensor:
    """Return fp32 ``[dim / 2]`` as transformers' rotary modules compute them."""
    scaling: dict[str, Any] = {"rope_type": "default", **model.scaling, "rope_theta": model.theta}
    kind = scaling["rope_type"]
    if kind == "default":
        exponents = torch.arange(0, model.dim, 2, dtype=torch.int64).to(torch.float32) / model.dim
        return 1.0 / (model.theta**exponents)
    config = PretrainedConfig(
        hidden_size=model.dim,
        num_attention_heads=1,
        head_dim=model.dim,
        max_position_embeddings=model.longest,
    )
    config.rope_parameters = scaling
    frequencies: torch.Tensor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0]
    return frequencies


def _as_model(plain: NDArray[np.float64], rotary: Rotary, position: int) -> torch.Tensor:
    """Return keys as a model computes them at a position, fp32 ``[n, dim]``."""
    keys = torch.from_numpy(plain).to(torch.float32)[:, None]
    places = torch.full((len(plain),), position, dtype=torch.int64)
    angles = rotary.angles(places).to(torch.float32)
    return rotary.apply(keys, *rotary.spread(angles.cos(), angles.sin()))[:, 0]


def rope(
    keys: NDArray[np.float64], frequencies: NDArray[np.float64], position: int, pairing: Pairing
) -> NDArray[np.float64]:
    """Return RoPE of ``keys [n, dim]`` at a position, in float64 (Su et al. 2021, equation 34)."""
    cos, sin = np.cos(position * frequencies), np.sin(position * frequencies)
    out = np.empty_like(keys)
    if pairing is Pairing.INTERLEAVED:
        first, second = slice(0, None, 2), slice(1, None, 2)
    else:
        half = keys.shape[-1] // 2
        first, second = slice(0, half), slice(half, None)
    out[:, first] = keys[:, first] * cos - keys[:, second] * sin
    out[:, second] = keys[:, second] * cos + keys[:, first] * sin
    return out


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest L2 distance of a row, relative to the expected row's length."""
    wanted = expected.double()
    return float(((found.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())
