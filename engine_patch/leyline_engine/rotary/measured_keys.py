"""The gate for models: measured facts of a loaded model's keys, whatever its class is called.

An engine probes its model, which only it can do; all that follows is the same for all engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from leyline_engine.contract import RotaryFacts
from leyline_engine.rotary.explained_keys import (
    TOLERANCE,
    Frequencies,
    ProbedLayer,
    UnsupportedRotaryError,
    explain,
    stand_still,
)
from leyline_engine.rotary.rotation import ModelRotary, Pairing, Rotary
from leyline_engine.rotary.tables import read_frequencies, rotary_modules

_POSITIONS = (0, 1, 17, 977, 4093)
_LEAST_DISTANCE = 64
"""Smallest distance between the first and the last probe that says anything."""

Probe = Callable[[Sequence[int], Sequence[int]], Sequence[ProbedLayer]]
"""Runs tokens alone at positions; returns their rows in every layer."""
FullTable = Callable[[Any], torch.Tensor | None]
"""Returns a rotary module's table before it was rounded; None for the one it has."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured rotations of a model's keys."""

    rotary: ModelRotary
    """On the CPU."""
    start: int
    """First of the dimensions of a pool's key that turn."""
    facts: RotaryFacts


def measure_model(
    model: torch.nn.Module,
    probe: Probe,
    *,
    longest: int,
    vocabulary: int,
    dtypes: Iterable[torch.dtype],
    full_table: FullTable = lambda module: None,
) -> Measured:
    """Probe a model and find the one rotation that explains its cached keys.

    Args:
        model: as loaded on this rank.
        probe: runs the model.
        longest: number of positions that are used.
        vocabulary: number of token ids.
        dtypes: dtypes that keys go through.
        full_table: see :data:`FullTable`.

    Raises:
        UnsupportedRotaryError: the keys turn otherwise, or can't be measured.
    """
    candidates = _candidates(model, longest, full_table)
    layers, positions = _probed(model, probe, longest, vocabulary)
    return _explained(layers, positions, candidates, _coarsest(dtypes))


def measure_parts(
    model: torch.nn.Module,
    probe: Probe,
    parts: Sequence[slice],
    *,
    longest: int,
    vocabulary: int,
    dtypes: Iterable[torch.dtype],
) -> list[Measured]:
    """Do the same for parts of the layers, whose keys may differ in shape and rotation.

    The keys of a part may stand still (NoPE), as those of many models with recurrent layers do.

    Args:
        parts: places in what ``probe`` returns.
    """
    layers, positions = _probed(model, probe, longest, vocabulary)
    coarsest, found = _coarsest(dtypes), list[Measured]()
    for part in parts:
        if stand_still(layers[part], coarsest):
            found.append(_STILL)
        else:
            candidates = _candidates(model, longest, lambda _: None)
            found.append(_explained(layers[part], positions, candidates, coarsest))
    return found


_STILL = Measured(
    Rotary.still(2, Pairing.HALF_SPLIT),
    0,
    RotaryFacts(rope_type="none", pairing=Pairing.HALF_SPLIT, rotary_dim=0, inv_freq_digest=""),
)


def _coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    return max(dtypes, key=lambda each: TOLERANCE.get(each, torch.inf))


def _probed(
    model: torch.nn.Module, probe: Probe, longest: int, vocabulary: int
) -> tuple[Sequence[ProbedLayer], torch.Tensor]:
    """Return the rows of every layer at several positions, and the positions."""
    tables = (int(module.cos_sin_cache.shape[0]) for module in rotary_modules(model))
    last = min([longest, *tables]) - 1
    if last < _LEAST_DISTANCE:
        raise UnsupportedRotaryError(f"a context of {last + 1} tokens, too short to measure keys")
    positions = sorted({p for p in (*_POSITIONS, last // 2, last) if p <= last})
    return probe((vocabulary // 3, vocabulary // 2), positions), torch.tensor(positions)


def _explained(
    layers: Sequence[ProbedLayer],
    positions: torch.Tensor,
    candidates: Sequence[Frequencies],
    dtype: torch.dtype,
) -> Measured:
    explained = explain(layers, positions, candidates, dtype)
    return Measured(explained.rotary, explained.start, explained.facts)


def _candidates(model: torch.nn.Module, longest: int, full_table: FullTable) -> list[Frequencies]:
    """Return the frequencies of all tables that can be explained.

    Raises:
        UnsupportedRotaryError: there are none.
    """
    found, problems = list[Frequencies](), list[str]()
    for module in rotary_modules(model):
        try:
            found.append(read_frequencies(module, longest, full_table(module)))
        except UnsupportedRotaryError as error:
            problems.append(f"{error} ({type(module).__qualname__})")
    if not found:
        # LongRoPE, among others, keeps more tables than one and chooses by the prompt's length.
        names = {type(m).__qualname__ for m in model.modules() if "Rotary" in type(m).__qualname__}
        problems += [f"rotary embedding {name}" for name in sorted(names)]
        raise UnsupportedRotaryError(
            problems[0] if problems else "layers without a rotary embedding"
        )
    return found
