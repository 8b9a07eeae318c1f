"""The frequencies of rotary tables: found on any table that has them, whatever made it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.layers.rotary_embedding import get_rope

from leyline_engine.rotary.explained_keys import UnsupportedRotaryError
from leyline_engine.rotary.tables import read_frequencies, rotary_modules

ROWS = 8192
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 2048,
}
KINDS: dict[str, tuple[dict[str, Any] | None, int, Callable[[Any], torch.Tensor]]] = {
    "default": (None, 64, lambda m: m._compute_inv_freq(m.base)),
    "partial": (None, 48, lambda m: m._compute_inv_freq(m.base)),
    "linear": (
        {"rope_type": "linear", "factor": 2.5},
        64,
        lambda m: m._compute_inv_freq(m.base) / 2.5,
    ),
    "llama3": (LLAMA3, 64, lambda m: m._compute_inv_freq(m.base)),
    "yarn": (YARN, 64, lambda m: m._compute_inv_freq(m.scaling_factor)),
    "deepseek": (
        YARN | {"rope_type": "deepseek_yarn", "mscale": 0.707, "mscale_all_dim": 0.3},
        64,
        lambda m: m._compute_inv_freq(m.scaling_factor),
    ),
    "M-RoPE": (
        {"rope_type": "default", "mrope_section": [8, 12, 12]},
        64,
        lambda m: m._compute_inv_freq(m.base),
    ),
}
"""By kind: scaling, rotary width, and the frequencies that SGLang's module computes for itself."""


@pytest.fixture(autouse=True)
def fresh_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang shares rotary modules by their parameters; a test that spoils one spoils its own."""
    monkeypatch.setattr("sglang.srt.layers.rotary_embedding.factory._ROPE_DICT", {})


def rope(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """A rotary module of SGLang's."""
    scaling, width, _ = KINDS[kind]
    return get_rope(64, width, ROWS, 10000, kind != "deepseek", scaling, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_the_frequencies_of_a_table_are_the_module_s_own(kind: str) -> None:
    """Every bit is found in an fp32 table, without a look at the module's class.

    A linear scaling divides the positions, so no fp32 frequency gives its table exactly.
    """
    module = rope(kind)
    found = read_frequencies(module, ROWS)
    own = KINDS[kind][2](module).to(torch.float32)
    assert torch.allclose(found.inv_freq, own, rtol=2.0**-22 if kind == "linear" else 0, atol=0)
    assert found.scaling == pytest.approx(float(getattr(module, "mscale", 1.0)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_coarse_table_gives_angles_as_exact_as_itself(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At no position is an angle off by more than two roundings of the table."""
    monkeypatch.setenv("SGLANG_ROPE_CACHE_FP32", "0")
    module = rope("default")
    exact = read_frequencies(module, ROWS).inv_freq.double()
    module.cos_sin_cache = module.cos_sin_cache.to(dtype)
    found = read_frequencies(module, ROWS).inv_freq.double()
    step = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    assert float(((found - exact) * ROWS).abs().max()) <= 2 * step
    assert not torch.equal(found, exact)


@given(
    base=st.floats(50.0, 5e7),
    half=st.integers(1, 64),
    last=st.integers(64, 200_000),
    scaling=st.sampled_from([1.0, 0.71, 1.3]),
)
def test_any_table_of_one_frequency_per_pair_is_read_exactly(
    base: float, half: int, last: int, scaling: float
) -> None:
    """Random bases, widths, lengths and factors: each position's angle is the table's."""
    inv_freq = 1.0 / base ** (torch.arange(half, dtype=torch.float32) / half)
    rows = torch.arange(last + 1, dtype=torch.float32)
    angles = rows[:, None] * inv_freq[None]
    table = scaling * torch.cat((angles.cos(), angles.sin()), dim=-1)
    found = read_frequencies(SimpleNamespace(cos_sin_cache=table), last + 1).inv_freq
    again = rows[-1] * found.double() - rows[-1] * inv_freq.double()
    assert float(again.abs().max()) <= last * 2.0**-24
    less = read_frequencies(SimpleNamespace(cos_sin_cache=table), last // 2 + 2).inv_freq
    assert torch.allclose(less, inv_freq, rtol=1e-6)


def _shifted(table: torch.Tensor) -> torch.Tensor:
    return table.roll(1, dims=0)


def _kinked(table: torch.Tensor) -> torch.Tensor:
    """Other frequencies from half the positions on, as LongRoPE has them."""
    half = len(table) // 2
    return torch.cat((table[:half], table[:half]))


def _spoilt_at_the_end(table: torch.Tensor) -> torch.Tensor:
    return torch.cat((table[:-1], -table[-1:]))


def _spoilt_between(table: torch.Tensor) -> torch.Tensor:
    """A few dozen rows between powers of two."""
    return torch.cat((table[:5000], -table[5000:5064], table[5064:]))


def _no_numbers(table: torch.Tensor) -> torch.Tensor:
    return table * float("nan")


def _swapped(table: torch.Tensor) -> torch.Tensor:
    """Sines first."""
    return table.roll(table.shape[1] // 2, dims=1)


def _grown(table: torch.Tensor) -> torch.Tensor:
    """A factor that grows with the position, as xPos has it."""
    return table * torch.linspace(1, 2, len(table))[:, None]


@pytest.mark.parametrize(
    "spoil",
    [_shifted, _kinked, _spoilt_at_the_end, _spoilt_between, _no_numbers, _swapped, _grown],
)
def test_other_tables_are_refused(spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Control: a table that isn't that of one frequency per pair is found out."""
    module = rope("default")
    read_frequencies(module, ROWS)
    module.cos_sin_cache = spoil(module.cos_sin_cache)
    with pytest.raises(UnsupportedRotaryError, match=r"no frequencies explain|begins with no"):
        read_frequencies(module, ROWS)


def test_tables_are_found_wherever_a_model_keeps_them() -> None:
    """A module that two layers share counts once; what isn't a table of rows doesn't count."""
    model = torch.nn.Module()
    model.first = model.second = rope("default")
    model.vision = torch.nn.Module()
    model.vision.cos_sin_cache = torch.zeros(3)
    model.inner = torch.nn.Module()
    model.inner.other = rope("yarn")
    assert rotary_modules(model) == [model.first, model.inner.other]


def test_rows_that_no_prompt_reaches_are_not_looked_at() -> None:
    """SGLang makes tables longer than the model's context, and not always by the same rule."""
    module = rope("default")
    own = read_frequencies(module, ROWS).inv_freq
    module.cos_sin_cache = torch.cat((module.cos_sin_cache, module.cos_sin_cache[:256]))
    assert torch.equal(read_frequencies(module, ROWS).inv_freq, own)
    with pytest.raises(UnsupportedRotaryError, match="no frequencies explain"):
        read_frequencies(module, ROWS + 256)
