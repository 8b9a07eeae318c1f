"""The gate for models on SGLang: its context, for :mod:`leyline_engine.rotary.measured_keys`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from leyline_engine.rotary.measured_keys import Measured, measure_model
from leyline_engine.sglang.facts.probe import probe_layers


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
    return measure_model(
        context.tp_worker.model_runner.model,
        partial(probe_layers, context, tree),
        longest=int(context.model_config.context_len),
        vocabulary=int(context.model_config.vocab_size),
        dtypes=(dtype, context.model_config.dtype),
    )
