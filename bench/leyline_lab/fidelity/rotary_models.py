"""The published rotary parameters of current models, and their frequencies in float64. Pure.

The frequencies are computed here from their papers' formulas, independently of any library: YaRN
(Peng et al. 2023, equations 17 to 20), Llama 3.1's smoothing between wavelengths, and division of
positions by a factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leyline_engine.rotary.rotation import Pairing


@dataclass(frozen=True, slots=True, eq=False)
class RotaryModel:
    """A model's rotary parameters, as its published configuration has them."""

    name: str
    theta: float
    dim: int
    """Dimensions of a key that are rotated."""
    longest: int
    """Positions that the model was made for."""
    pairing: Pairing = Pairing.HALF_SPLIT
    scaling: Mapping[str, Any] = field(default_factory=dict)
    """``rope_scaling`` with its ``rope_type``; empty for none."""

    def frequencies(self) -> NDArray[np.float64]:
        """Return the angles per position in float64, ``[dim / 2]``.

        Raises:
            ValueError: the type of scaling is unknown.
        """
        exponents = np.arange(0, self.dim, 2, dtype=np.float64) / self.dim
        plain = self.theta**-exponents
        match self.scaling.get("rope_type", "default"):
            case "default":
                return plain
            case "linear":
                return plain / float(self.scaling["factor"])
            case "llama3":
                return _llama3(plain, self.scaling)
            case "yarn":
                return _yarn(plain, self.theta, self.dim, self.scaling)
            case unknown:
                raise ValueError(f"no formula for rope_type {unknown!r}")


def _llama3(plain: NDArray[np.float64], given: Mapping[str, Any]) -> NDArray[np.float64]:
    factor, original = float(given["factor"]), float(given["original_max_position_embeddings"])
    low, high = float(given["low_freq_factor"]), float(given["high_freq_factor"])
    turns = original * plain / (2 * math.pi)
    """Turns over the original context."""
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - smooth) * plain / factor + smooth * plain


def _yarn(
    plain: NDArray[np.float64], theta: float, dim: int, given: Mapping[str, Any]
) -> NDArray[np.float64]:
    factor, original = float(given["factor"]), float(given["original_max_position_embeddings"])

    def place(turns: float) -> float:
        """Return the dimension that makes so many turns over the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = place(float(given["beta_fast"])), place(float(given["beta_slow"]))
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0.0), min(high, dim - 1.0)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    return ramp * plain / factor + (1 - ramp) * plain


_YARN = {"rope_type": "yarn", "original_max_position_embeddings": 4096}
MODELS = (
    RotaryModel(
        "DeepSeek-V3.2",
        1e4,
        64,
        163_840,
        Pairing.INTERLEAVED,
        {**_YARN, "factor": 40.0, "beta_fast": 32, "beta_slow": 1},
    ),
    RotaryModel(
        "Kimi-K2",
        5e4,
        64,
        131_072,
        Pairing.INTERLEAVED,
        {**_YARN, "factor": 32.0, "beta_fast": 1, "beta_slow": 1},
    ),
    RotaryModel("GLM-4.7", 1e6, 64, 202_752),
    RotaryModel("GLM-4.7-Flash", 1e6, 64, 202_752, Pairing.INTERLEAVED),
    RotaryModel("MiniMax-M2", 5e6, 64, 196_608),
    RotaryModel("Qwen3", 1e6, 128, 40_960),
    RotaryModel(
        "Llama-3.3",
        5e5,
        128,
        131_072,
        scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    RotaryModel(
        "gpt-oss",
        1.5e5,
        64,
        131_072,
        scaling={**_YARN, "factor": 32.0, "beta_fast": 32, "beta_slow": 1, "truncate": False},
    ),
    RotaryModel(
        "Gemma 3, global layers",
        1e6,
        128,
        131_072,
        scaling={"rope_type": "linear", "factor": 8.0},
    ),
    RotaryModel("Gemma 3, local layers", 1e4, 128, 131_072),
    RotaryModel("Hunyuan 3", 11_158_840.0, 128, 131_072),
)
"""The models, each once; their sizes and versions have the same parameters."""
