"""The gate for models: measured facts of a loaded model's keys, whatever its class is called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from leyline_engine.contract import RotaryFacts
from leyline_engine.explained_keys import TOLERANCE, Frequencies, UnsupportedRotaryError, explain
from leyline_engine.rotation import ModelRotary
from leyline_engine.sglang.facts.frequencies import read_frequencies, rotary_modules
from leyline_engine.sglang.facts.probe import probe_layers

_POSITIONS = (0, 1, 17, 977, 4093)
_LEAST_DISTANCE = 64
"""Smallest distance between the first and the last probe that says anything."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured rotations of a model's keys."""

    rotary: ModelRotary
    """On the CPU."""
    start: int
    """First of the dimensions of a pool's key that turn."""
    facts: RotaryFacts


def measure_keys(context: Any, tree: Any, dtype: torch.dtype) -> Measured:
    """Probe the model and find the one rotation that explains the keys in its pool.

    Args:
        context: SGLang's ``TreeCacheBuildContext``.
        tree: its tree cache, which is empty.
        dtype: of the pool.

    Raises:
        UnsupportedRotaryError: the keys turn otherwise, or can't be measured.
        ProbeError: the server has no room for the probe.
    """
    model = context.tp_worker.model_runner.model
    context_len = int(context.model_config.context_len)
    candidates = _candidates(model, context_len)
    shortest = min(int(module.cos_sin_cache.shape[0]) for module in rotary_modules(model))
    last = min(shortest, context_len) - 1
    if last < _LEAST_DISTANCE:
        raise UnsupportedRotaryError(f"a context of {last + 1} tokens, too short to measure keys")
    positions = sorted({p for p in (*_POSITIONS, last // 2, last) if p <= last})
    vocabulary = int(context.model_config.vocab_size)
    tokens = (vocabulary // 3, vocabulary // 2)
    layers = probe_layers(context, tree, tokens, positions)
    coarsest = max(
        (dtype, context.model_config.dtype), key=lambda each: TOLERANCE.get(each, torch.inf)
    )
    explained = explain(layers, torch.tensor(positions), candidates, coarsest)
    return Measured(explained.rotary, explained.start, explained.facts)


def _candidates(model: torch.nn.Module, longest: int) -> list[Frequencies]:
    """Return the frequencies of all tables that can be explained.

    Raises:
        UnsupportedRotaryError: there are none.
    """
    found, problems = list[Frequencies](), list[str]()
    for module in rotary_modules(model):
        try:
            found.append(read_frequencies(module, longest))
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
