"""The one rotation that explains a model's cached keys, found on synthetic keys with controls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.rotary.explained_keys import (
    Frequencies,
    ProbedLayer,
    UnsupportedRotaryError,
    explain,
)
from leyline_engine.rotary.rotation import Pairing, Rotary

POSITIONS = torch.tensor([0, 1, 17, 977, 4093, 65535])
TOKENS, HEADS, LAYERS = 2, 2, 3
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)


def frequencies(width: int, base: float = 10000.0, scaling: float = 1.0) -> Frequencies:
    """Frequencies as models have them."""
    inv_freq = 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    return Frequencies(inv_freq, scaling, "RotaryEmbedding")


def turned_keys(rotary: Rotary, start: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """Random keys of tokens, turned to every position in float64, apart from the product's code.

    Returns:
        float64 ``[tokens, positions, heads, width]``.
    """
    key = torch.randn(TOKENS, 1, HEADS, width, generator=generator, dtype=torch.float64)
    keys = key.repeat(1, len(POSITIONS), 1, 1)
    for pair, frequency in enumerate(rotary.inv_freq):
        step = 2 * pair if rotary.pairing is Pairing.INTERLEAVED else pair
        other = step + 1 if rotary.pairing is Pairing.INTERLEAVED else pair + rotary.dim // 2
        angle = (POSITIONS.to(torch.float32) * frequency).double()[None, :, None]
        a, b = key[..., start + step], key[..., start + other]
        keys[..., start + step] = a * angle.cos() - b * angle.sin()
        keys[..., start + other] = b * angle.cos() + a * angle.sin()
    return keys


def layers_of(
    rotary: Rotary,
    start: int = 0,
    width: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    spoil: Callable[[torch.Tensor], torch.Tensor] = lambda keys: keys,
    seed: int = 1,
) -> list[ProbedLayer]:
    """Layers of random keys under a rotation, rounded to a dtype; the last one may be spoilt."""
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for layer in range(LAYERS):
        keys = turned_keys(rotary, start, width or rotary.dim, generator)
        if layer == LAYERS - 1:
            keys = spoil(keys)
        value = torch.randn(TOKENS, 1, HEADS, 8, generator=generator)
        values = value.repeat(1, len(POSITIONS), 1, 1)
        layers.append(ProbedLayer(keys.to(torch.float32).to(dtype).float(), values))
    return layers


@given(
    pairing=st.sampled_from(Pairing),
    half=st.integers(2, 24),
    spare=st.integers(0, 40),
    last=st.booleans(),
    base=st.floats(500.0, 1e7),
    seed=st.integers(0, 2**31),
)
def test_the_rotation_of_random_keys_is_found(
    *, pairing: Pairing, half: int, spare: int, last: bool, base: float, seed: int
) -> None:
    """Pairing, width and place are found among candidates, with a decoy of other frequencies."""
    right = frequencies(2 * half, base)
    start = spare if last else 0
    rotary = Rotary(right.inv_freq, pairing)
    layers = layers_of(rotary, start, 2 * half + spare, seed=seed)
    decoys = [frequencies(2 * half, base * 1.3), frequencies(2 * half + 2, base), right]
    found = explain(layers, POSITIONS, decoys, torch.float32)
    assert (found.rotary.pairing, found.rotary.dim, found.start) == (pairing, 2 * half, start)
    assert torch.equal(found.rotary.inv_freq, right.inv_freq)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pairing", Pairing)
def test_rounded_keys_are_explained_by_the_right_rotation_alone(
    dtype: torch.dtype, pairing: Pairing
) -> None:
    """Down to e4m3; the other pairing, a base 1 % off and a narrower band explain nothing."""
    right = frequencies(32)
    rotary = Rotary(right.inv_freq, pairing)
    layers = layers_of(rotary, 0, 64, dtype=dtype)
    assert explain(layers, POSITIONS, [right], dtype).rotary.pairing is pairing
    for wrong in (frequencies(32, 10100.0), frequencies(30), frequencies(34), frequencies(64)):
        with pytest.raises(UnsupportedRotaryError, match="no one rotation"):
            explain(layers, POSITIONS, [wrong], dtype)
    off_by_one = POSITIONS + torch.tensor([0, 0, 1, 0, 0, 0])
    with pytest.raises(UnsupportedRotaryError, match="no one rotation"):
        explain(layers, off_by_one, [right], dtype)


def _normed_afterwards(keys: torch.Tensor) -> torch.Tensor:
    """A norm's weight on top of the rotation, as some models have it: it doesn't commute."""
    return keys * torch.linspace(0.8, 1.2, keys.shape[-1], dtype=keys.dtype)


def _scaled_by_position(keys: torch.Tensor) -> torch.Tensor:
    return keys * torch.linspace(1, 1.2, len(POSITIONS), dtype=keys.dtype)[:, None, None]


def _turned_twice(keys: torch.Tensor) -> torch.Tensor:
    rotary = Rotary(frequencies(32).inv_freq, Pairing.HALF_SPLIT)
    zero = torch.zeros_like(POSITIONS)
    return torch.stack([rotary.rotate(each, zero, POSITIONS) for each in keys])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_normed_afterwards, "no one rotation"),
        (_scaled_by_position, "no one rotation"),
        (_turned_twice, "no one rotation"),
        (lambda keys: keys * 0, "zero, or no numbers"),
        (lambda keys: keys * float("nan"), "zero, or no numbers"),
    ],
)
def test_one_layer_that_does_otherwise_is_enough_to_refuse(
    spoil: Callable[[torch.Tensor], torch.Tensor], said: str
) -> None:
    """The last layer's keys turn otherwise, or not at all: each is refused with its reason."""
    right = frequencies(32)
    rotary = Rotary(right.inv_freq, Pairing.HALF_SPLIT)
    with pytest.raises(UnsupportedRotaryError, match=said):
        explain(layers_of(rotary, 0, 32, spoil=spoil), POSITIONS, [right], torch.float32)


@given(
    pairing=st.sampled_from(Pairing),
    half=st.integers(4, 24),
    spare=st.integers(0, 40),
    bases=st.lists(st.sampled_from([0.0, 1e4, 5e5, 1e7]), min_size=2, max_size=6),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_each_layer_gets_its_own_rotation(
    *, pairing: Pairing, half: int, spare: int, bases: list[float], dtype: torch.dtype, seed: int
) -> None:
    """Layers of different frequencies, and of none, are told apart in every dtype."""
    candidates = {base: frequencies(2 * half, base) for base in (1e4, 5e5, 1e7)}
    still = Rotary.still(2 * half, pairing)
    rotaries = [Rotary(candidates[b].inv_freq, pairing) if b else still for b in bases]
    layers = [
        layers_of(rotary, 0, 2 * half + spare, dtype=dtype, seed=seed + number)[0]
        for number, rotary in enumerate(rotaries)
    ]
    if not any(bases):
        with pytest.raises(UnsupportedRotaryError, match="don't turn with the position"):
            explain(layers, POSITIONS, candidates.values(), dtype)
        return
    found = explain(layers, POSITIONS, candidates.values(), dtype)
    assert (found.rotary.pairing, found.rotary.dim, found.start) == (pairing, 2 * half, 0)
    for layer, rotary in enumerate(rotaries):
        assert torch.equal(found.rotary.at(layer).inv_freq, rotary.inv_freq)
    assert len(found.rotary.distinct) == len(set(bases))
    assert ("none" in found.facts.rope_type) == (0.0 in bases)


def test_a_second_rotation_that_explains_some_layers_is_chance() -> None:
    """The first layer's last pair is zero, so that any frequency explains it; the others' isn't."""
    right = frequencies(32)
    other = Frequencies(right.inv_freq.clone(), 1.0, "default")
    other.inv_freq[-1] *= 3
    layers = layers_of(Rotary(right.inv_freq, Pairing.HALF_SPLIT))
    layers[0].keys[..., [15, 31]] = 0
    found = explain(layers, POSITIONS, [right, other], torch.float32)
    assert torch.equal(found.rotary.at(0).inv_freq, right.inv_freq)
    with pytest.raises(UnsupportedRotaryError, match="more than one rotation"):
        explain(layers[:1], POSITIONS, [right, other], torch.float32)


def test_layers_that_turn_different_bands_are_refused() -> None:
    """Half of the key in one layer, and all of it in another."""
    wide, narrow = frequencies(32), frequencies(16)
    layers = [
        layers_of(Rotary(wide.inv_freq, Pairing.HALF_SPLIT))[0],
        layers_of(Rotary(narrow.inv_freq, Pairing.HALF_SPLIT), 0, 32)[1],
    ]
    with pytest.raises(UnsupportedRotaryError, match="different parts of their keys"):
        explain(layers, POSITIONS, [wide, narrow], torch.float32)


def test_a_narrow_band_is_not_taken_for_none() -> None:
    """Two of 512 dimensions turn: little in the error of a key in eight bits."""
    right = frequencies(2)
    narrow = layers_of(Rotary(right.inv_freq, Pairing.HALF_SPLIT), 0, 512, dtype=DTYPES[-1])
    wide = layers_of(Rotary(frequencies(32).inv_freq, Pairing.HALF_SPLIT), 0, 512)
    with pytest.raises(UnsupportedRotaryError):
        explain([*wide, narrow[0]], POSITIONS, [frequencies(32)], DTYPES[-1])


def test_a_layer_that_turns_slowly_is_not_taken_for_one_that_stands_still() -> None:
    """A twelve-hundredth of a turn over the whole context is a rotation, too."""
    slow = Frequencies(torch.full((16,), 8e-8), 1.0, "default")
    usual = frequencies(32)
    layers = [layers_of(Rotary(each.inv_freq, Pairing.HALF_SPLIT))[0] for each in (slow, usual)]
    found = explain(layers, POSITIONS, [slow, usual], torch.float16)
    assert torch.equal(found.rotary.at(0).inv_freq, slow.inv_freq)


def test_layers_in_another_order_have_another_digest() -> None:
    """Ranks and replicas that turn other layers don't agree."""
    one, other = (
        layers_of(Rotary(frequencies(32, base).inv_freq, Pairing.HALF_SPLIT))[0]
        for base in (1e4, 5e5)
    )
    candidates = [frequencies(32, 1e4), frequencies(32, 5e5)]
    digests = {
        explain(layers, POSITIONS, candidates, torch.float32).facts.inv_freq_digest
        for layers in ([one, one, other], [one, other, other], [one, one, one])
    }
    assert len(digests) == 3


def test_values_must_not_depend_on_the_position() -> None:
    """A learned position in the hidden state shows in the values."""
    right = frequencies(32)
    (layer, *_) = layers_of(Rotary(right.inv_freq, Pairing.HALF_SPLIT))
    assert layer.values is not None
    values = layer.values * torch.linspace(1, 1.5, len(POSITIONS))[:, None, None]
    with pytest.raises(UnsupportedRotaryError, match="values that depend on the position"):
        explain([ProbedLayer(layer.keys, values)], POSITIONS, [right], torch.float32)


def test_what_cannot_be_told_apart_is_refused() -> None:
    """One pair of dimensions turns alike under both pairings, and no tables explain nothing."""
    right = frequencies(2)
    layers = layers_of(Rotary(right.inv_freq, Pairing.HALF_SPLIT))
    with pytest.raises(UnsupportedRotaryError, match="more than one rotation"):
        explain(layers, POSITIONS, [right], torch.float32)
    with pytest.raises(UnsupportedRotaryError, match="without a rotary embedding"):
        explain(layers, POSITIONS, [], torch.float32)
    with pytest.raises(UnsupportedRotaryError, match="keys in float64"):
        explain(layers, POSITIONS, [right], torch.float64)
