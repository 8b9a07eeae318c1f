"""Rotation against complex multiplication in fp64, with controls that must fail."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from leyline_engine.rotary.rotation import Pairing, Rotary

HEADS = 3
OTHER = {
    Pairing.HALF_SPLIT: Pairing.INTERLEAVED,
    Pairing.INTERLEAVED: Pairing.HALF_SPLIT,
}


def frequencies(dim: int, theta: float = 10000.0) -> torch.Tensor:
    """Inverse frequencies of a default rotary embedding, fp32 ``[dim/2]``."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def complex_reference(
    keys: torch.Tensor,
    inv_freq: torch.Tensor,
    computed_at: list[int],
    needed_at: list[int],
    pairing: Pairing,
) -> npt.NDArray[np.float64]:
    """Keys as complex numbers, turned by exp(i(θq − θp)); nothing shared with the code tested."""
    values = keys.double().numpy()
    half = values.shape[-1] // 2
    place = {
        Pairing.INTERLEAVED: [(2 * i, 2 * i + 1) for i in range(half)],
        Pairing.HALF_SPLIT: [(i, i + half) for i in range(half)],
    }[pairing]
    out = np.empty_like(values)
    for row, (p, q) in enumerate(zip(computed_at, needed_at, strict=True)):
        for i, (real, imaginary) in enumerate(place):
            frequency = np.float32(inv_freq[i].item())
            angle = float(np.float32(q) * frequency) - float(np.float32(p) * frequency)
            turned = (values[row, :, real] + 1j * values[row, :, imaginary]) * np.exp(1j * angle)
            out[row, :, real], out[row, :, imaginary] = turned.real, turned.imag
    return out


def worst(one: torch.Tensor, other: npt.NDArray[np.float64]) -> float:
    """Largest absolute difference."""
    return float(np.abs(one.double().numpy() - other).max())


@st.composite
def moves(draw: st.DrawFn) -> tuple[torch.Tensor, list[int], list[int], torch.Tensor, Pairing]:
    """Fresh random keys with where they were computed and where they are needed."""
    dim = draw(st.sampled_from([2, 8, 64, 128]))
    rows = draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    keys = torch.randn(rows, HEADS, dim, generator=generator)
    positions = st.lists(st.integers(0, 131071), min_size=rows, max_size=rows)
    inv_freq = frequencies(dim, draw(st.sampled_from([10000.0, 1e6])))
    return keys, draw(positions), draw(positions), inv_freq, draw(st.sampled_from(Pairing))


@settings(max_examples=examples(60))
@given(moves())
def test_agrees_with_complex_multiplication(
    case: tuple[torch.Tensor, list[int], list[int], torch.Tensor, Pairing],
) -> None:
    """They agree for both pairings, any width and distance, each row by its own distance."""
    keys, computed_at, needed_at, inv_freq, pairing = case
    rotary = Rotary(inv_freq, pairing)
    moved = rotary.rotate(keys, torch.tensor(computed_at), torch.tensor(needed_at))
    expected = complex_reference(keys, inv_freq, computed_at, needed_at, pairing)
    assert worst(moved, expected) < 2e-6 * float(keys.abs().max()) * 4
    assert moved.dtype == keys.dtype


@settings(max_examples=examples(40))
@given(moves())
def test_round_trip_and_norm(
    case: tuple[torch.Tensor, list[int], list[int], torch.Tensor, Pairing],
) -> None:
    """There and back is the identity; a rotation changes no length."""
    keys, computed_at, needed_at, inv_freq, pairing = case
    rotary = Rotary(inv_freq, pairing)
    p, q = torch.tensor(computed_at), torch.tensor(needed_at)
    moved = rotary.rotate(keys, p, q)
    assert torch.allclose(rotary.rotate(moved, q, p), keys, atol=5e-6)
    assert torch.allclose(moved.norm(dim=-1), keys.norm(dim=-1), rtol=1e-5)
    assert torch.equal(rotary.rotate(keys, p, p), keys)


@settings(max_examples=examples(40))
@given(moves(), st.integers(0, 131071))
def test_composition(
    case: tuple[torch.Tensor, list[int], list[int], torch.Tensor, Pairing], between: int
) -> None:
    """p → r → q equals p → q."""
    keys, computed_at, needed_at, inv_freq, pairing = case
    rotary = Rotary(inv_freq, pairing)
    p, q = torch.tensor(computed_at), torch.tensor(needed_at)
    r = torch.full_like(p, between)
    direct = rotary.rotate(keys, p, q)
    assert torch.allclose(rotary.rotate(rotary.rotate(keys, p, r), r, q), direct, atol=1e-5)


@pytest.mark.parametrize("pairing", list(Pairing))
def test_controls_fail(pairing: Pairing) -> None:
    """The comparison sees a wrong pairing, a wrong sign, a wrong base and a distance off by one."""
    generator = torch.Generator().manual_seed(5)
    keys = torch.randn(4, HEADS, 64, generator=generator)
    inv_freq = frequencies(64)
    p, q = [10, 20, 30, 40], [3, 90, 31, 1000]
    at_p, at_q = torch.tensor(p), torch.tensor(q)
    expected = complex_reference(keys, inv_freq, p, q, pairing)
    right = Rotary(inv_freq, pairing)
    assert worst(right.rotate(keys, at_p, at_q), expected) < 1e-5
    wrong = [
        Rotary(inv_freq, OTHER[pairing]).rotate(keys, at_p, at_q),
        right.rotate(keys, at_q, at_p),
        Rotary(frequencies(64, 1e6), pairing).rotate(keys, at_p, at_q),
        right.rotate(keys, at_p, at_q + 1),
    ]
    assert all(worst(result, expected) > 0.1 for result in wrong)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rounds_once(dtype: torch.dtype) -> None:
    """Half-precision keys are turned in fp32 and rounded once, at the end."""
    generator = torch.Generator().manual_seed(6)
    keys = torch.randn(8, HEADS, 64, generator=generator).to(dtype)
    rotary = Rotary(frequencies(64), Pairing.HALF_SPLIT)
    p, q = torch.arange(8), torch.arange(8) * 37 + 5
    exact = rotary.rotate(keys.float(), p, q)
    moved = rotary.rotate(keys, p, q)
    assert moved.dtype == dtype
    assert torch.equal(moved, exact.to(dtype))


def test_distance_is_that_of_the_models_own_angles() -> None:
    """Far out the result is what the model computes there, fp32 rounding of its angles included."""
    inv_freq = frequencies(64)
    generator = torch.Generator().manual_seed(7)
    raw = torch.randn(1, 1, 64, generator=generator)
    rotary = Rotary(inv_freq, Pairing.HALF_SPLIT)

    def as_model(position: int) -> torch.Tensor:
        angles = torch.cat([torch.tensor(float(position)) * inv_freq] * 2)
        turned = torch.cat([-raw[..., 32:], raw[..., :32]], dim=-1)
        return raw * angles.cos() + turned * angles.sin()

    moved = rotary.rotate(as_model(120_000), torch.tensor([120_000]), torch.tensor([77_777]))
    assert torch.allclose(moved, as_model(77_777), atol=2e-6)
