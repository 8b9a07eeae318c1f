"""An operator's settings of an engine's plugin, from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from leyline_engine.contract import Capability, Recompute, own_profile

MATCHER_VARIABLE = "LEYLINE_REUSE_MATCHER"
"""``winnow``, ``cdc`` or ``off``: the choice of fingerprints by which content is found."""
PROFILE_VARIABLE = "LEYLINE_FIDELITY_PROFILE"
"""Path of a file with the model's fidelity profile."""
MIN_COPY_VARIABLE = "LEYLINE_MIN_COPY_TOKENS"
_MIN_COPY = 32
"""Minimum length of copies, in tokens; a shorter prefill costs less than a launch."""
STAGE_COST_VARIABLE = "LEYLINE_STAGE_COST_TOKENS"
_STAGE_COST = 64
"""Tokens whose prefill takes as long as one more forward: ``leyline_lab stage-cost``."""


def copy_limits(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return the fewest tokens of a copy, and of copies between two gaps.

    Raises:
        ValueError: one isn't a number of tokens.
    """
    found = []
    for name, default in ((MIN_COPY_VARIABLE, _MIN_COPY), (STAGE_COST_VARIABLE, _STAGE_COST)):
        written = environment.get(name) or str(default)
        if not written.isdecimal():
            raise ValueError(f"{name}: {written!r} is no number of tokens")
        found.append(int(written))
    return found[0], found[1]


def recompute_from(
    capability: Capability, environment: Mapping[str, str] = os.environ
) -> Recompute:
    """Return the tokens after edits that the operator wants computed again.

    Raises:
        ProfileError: the file has no profile for the model.
    """
    path = environment.get(PROFILE_VARIABLE)
    if not path:
        return Recompute()
    return own_profile(Path(path), capability.model, capability.model_fingerprint).recompute
