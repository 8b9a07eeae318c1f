"""The frequencies of a rotary embedding, measured on its own table of cosines and sines.

The class and the configuration behind a table don't matter: a table is that of one frequency per
pair, times one factor, or it isn't.
"""

from __future__ import annotations

from typing import Any

import torch

from leyline_engine.rotary.explained_keys import Frequencies, UnsupportedRotaryError

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Tolerance of a cosine, as a share of the factor."""
_ANGLE_STEP = 2**-22
"""One step of fp32 in a frequency moves the angle of position p by p times that."""
_SAMPLED_ROWS = 256
_NEIGHBOURS = range(-2, 3)
"""Steps of fp32 around an estimate among which the exact frequency is looked for."""
_ROPE_TYPES = {
    "RotaryEmbedding": "default",
    "LinearScalingRotaryEmbedding": "linear",
    "Llama3RotaryEmbedding": "llama3",
    "YaRNScalingRotaryEmbedding": "yarn",
    "DeepseekScalingRotaryEmbedding": "yarn",
}
"""Names for display; the class of any other module is its name."""


def rotary_modules(model: torch.nn.Module) -> list[Any]:
    """Return the modules of a model that keep a table ``[positions, cos | sin]``, each once."""
    found: dict[int, Any] = {}
    for module in model.modules():
        table = getattr(module, "cos_sin_cache", None)
        if isinstance(table, torch.Tensor) and table.dim() == 2:
            found[id(module)] = module
    return list(found.values())


def read_frequencies(module: Any, longest: int, table: torch.Tensor | None = None) -> Frequencies:
    """Measure the table of one module.

    Args:
        module: one of :func:`rotary_modules`.
        longest: number of positions that are used; engines add rows for more, which may differ.
        table: the same table before it was rounded to a coarser dtype; None for the module's own.

    Raises:
        UnsupportedRotaryError: the table isn't that of one frequency per pair and one factor.
    """
    table = (module.cos_sin_cache if table is None else table).detach()[:longest]
    rows, width = int(table.shape[0]), int(table.shape[1])
    if rows < 2 or width < 2 or width % 2:
        raise UnsupportedRotaryError(f"a rotary table of shape {tuple(table.shape)}")
    scaling = float(table[0, 0])
    if not scaling > 0.0:
        raise UnsupportedRotaryError("a rotary table that begins with no cosine")
    inv_freq = _exact(table, _estimate(table), scaling)
    _check(table, inv_freq, scaling)
    name = type(module).__qualname__
    return Frequencies(inv_freq, scaling, _ROPE_TYPES.get(name, name))


def _angles(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the angles ``[n, d/2]`` in (−π, π] of some positions, fp64."""
    cos, sin = table[rows.to(table.device)].to("cpu", torch.float64).chunk(2, dim=-1)
    return torch.atan2(sin, cos)


def _estimate(table: torch.Tensor) -> torch.Tensor:
    """Return frequencies in fp64: that of position 1, refined at ever longer distances.

    Each step predicts the angle at twice the distance well enough to know its full turns.
    """
    last = int(table.shape[0]) - 1
    distances = [1 << k for k in range(last.bit_length())] + [last]
    angles = _angles(table, torch.tensor(distances))
    estimate = angles[0].clone()
    for distance, angle in zip(distances[1:], angles[1:], strict=True):
        error = angle - estimate * distance
        estimate += torch.remainder(error + torch.pi, 2 * torch.pi).sub_(torch.pi) / distance
    return estimate


def _exact(table: torch.Tensor, estimate: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return the fp32 frequencies, near an estimate, whose fp32 angles give the table.

    At long positions the rounding of an angle depends on the last bit of its frequency.
    """
    last = int(table.shape[0]) - 1
    rows = torch.unique(torch.tensor([last, last // 2, last // 3, last // 5, last // 7]))
    held = table[rows.to(table.device)].to("cpu", torch.float64)
    nearest = estimate.to(torch.float32)
    steps = torch.stack([_neighbour(nearest, step) for step in _NEIGHBOURS])
    errors = [(_table(inv_freq, rows, scaling) - held).abs() for inv_freq in steps]
    cos, sin = torch.stack(errors).chunk(2, dim=-1)
    best = (cos + sin).sum(dim=1).argmin(dim=0)
    return steps.gather(0, best[None])[0]


def _neighbour(values: torch.Tensor, steps: int) -> torch.Tensor:
    """Return fp32 values moved by a number of steps to larger or smaller ones; zeros stay."""
    towards = torch.full_like(values, torch.inf if steps > 0 else -torch.inf)
    moved = values
    for _ in range(abs(steps)):
        moved = torch.nextafter(moved, towards)
    return torch.where(values == 0, values, moved)


def _table(inv_freq: torch.Tensor, rows: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return the rows ``[n, cos | sin]`` that fp32 angles of ``inv_freq`` give, fp64."""
    angles = (rows.to(torch.float32)[:, None] * inv_freq[None, :]).to(torch.float64)
    return scaling * torch.cat((angles.cos(), angles.sin()), dim=-1)


def _check(table: torch.Tensor, inv_freq: torch.Tensor, scaling: float) -> None:
    """Check that a table is that of its frequencies, near its beginning, its end and between."""
    last = int(table.shape[0]) - 1
    powers = [1 << k for k in range(last.bit_length())]
    between = torch.linspace(0, last, _SAMPLED_ROWS).to(torch.int64).tolist()
    rows = torch.unique(torch.tensor([*powers, *between]))
    held = table[rows.to(table.device)].to("cpu", torch.float64)
    slack = _TOLERANCE.get(table.dtype, 0.0) + rows[:, None] * _ANGLE_STEP
    within = (held - _table(inv_freq, rows, scaling)).abs() <= slack * abs(scaling)
    if not bool(within.all()):
        raise UnsupportedRotaryError("cached cosines that no frequencies explain")
