"""Attention on the CPU equals the textbook's, computed in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from leyline_lab.sglang_cpu.backend import CpuAttentionBackend

TOLERANCE = 2e-5


@dataclass(frozen=True)
class Heads:
    """Sizes of one layer's attention."""

    queries: int
    keys: int
    dim: int
    value_dim: int


HEADS = {
    "mha": Heads(4, 4, 32, 32),
    "gqa": Heads(8, 2, 32, 32),
    # One latent of 64 dims and 32 rotary ones, read as the value without them.
    "mla": Heads(4, 1, 96, 64),
}
# New tokens per sequence after cached ones: (cached, new). The last reaches over a block of rows.
BATCHES = {
    "no prefix": [(0, 5), (0, 1), (0, 17)],
    "short suffix": [(900, 1), (333, 7)],
    "mixed": [(0, 3), (700, 300), (12, 1)],
    "several blocks": [(0, 600)],
}


@dataclass(frozen=True)
class Batch:
    """SGLang's input to attention, with the pool's rows in random order."""

    heads: Heads
    lengths: list[tuple[int, int]]
    query: Tensor
    k_cache: Tensor
    v_cache: Tensor
    req_to_token: Tensor
    rows: Tensor
    scale: float

    def run(self, backend: type[TorchNativeAttnBackend], *, decode: bool = False) -> Tensor:
        """The backend's output ``[tokens, heads, value_dim]``."""
        instance = backend.__new__(backend)  # the computation reads nothing of the server
        output = torch.full((len(self.query), self.heads.queries, self.heads.value_dim), torch.nan)
        prefixes, new = (torch.tensor(column) for column in zip(*self.lengths, strict=True))
        common: dict[str, Any] = {
            "scaling": self.scale,
            "enable_gqa": self.heads.queries != self.heads.keys,
            "is_cross_attn": False,
            "sliding_window_size": None,
        }
        where = (self.query, output, self.k_cache, self.v_cache, self.req_to_token, self.rows)
        if decode:
            return instance._run_sdpa_forward_decode(*where, prefixes + new, None, **common)
        lengths = (prefixes + new, prefixes, new)
        return instance._run_sdpa_forward_extend(*where, *lengths, None, causal=True, **common)

    def reference(self, *, sees_ahead: int = 0) -> Tensor:
        """The textbook's answer in float64, one query at a time.

        ``sees_ahead`` lets each token read that many later ones, which is wrong.
        """
        results = []
        queries = iter(self.query.double())
        group = self.heads.queries // self.heads.keys
        for row, (cached, new) in zip(self.rows.tolist(), self.lengths, strict=True):
            slots = self.req_to_token[row, : cached + new]
            keys = self.k_cache[slots].double().repeat_interleave(group, dim=1)
            values = self.v_cache[slots].double().repeat_interleave(group, dim=1)
            for position in range(cached, cached + new):
                end = position + 1 + sees_ahead
                scores = torch.einsum("hd,thd->ht", next(queries), keys[:end]) * self.scale
                results.append(torch.einsum("ht,thd->hd", scores.softmax(-1), values[:end]))
        return torch.stack(results)


def _batch(heads: Heads, lengths: list[tuple[int, int]]) -> Batch:
    generator = torch.Generator().manual_seed(7)
    total = sum(cached + new for cached, new in lengths)
    longest = max(cached + new for cached, new in lengths)
    k_cache = torch.randn(total + 1, heads.keys, heads.dim, generator=generator)
    latent = heads.value_dim < heads.dim
    v_cache = (
        k_cache[..., : heads.value_dim]
        if latent
        else torch.randn(total + 1, heads.keys, heads.value_dim, generator=generator)
    )
    free = torch.randperm(total, generator=generator) + 1
    rows = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)]
    req_to_token = torch.zeros(len(lengths) + 2, longest + 3, dtype=torch.int32)
    start = 0
    for row, (cached, new) in zip(rows.tolist(), lengths, strict=True):
        req_to_token[row, : cached + new] = free[start : start + cached + new]
        start += cached + new
    new_tokens = sum(new for _, new in lengths)
    query = torch.randn(new_tokens, heads.queries, heads.dim, generator=generator)
    scale = heads.dim**-0.5
    return Batch(heads, lengths, query, k_cache, v_cache, req_to_token, rows, scale)


def _error(got: Tensor, expected: Tensor) -> float:
    return (got.double() - expected).abs().max().item()


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_extend_is_causal_attention(heads: Heads, lengths: list[tuple[int, int]]) -> None:
    """New tokens of a batch read all earlier tokens of their own sequence and no later one."""
    batch = _batch(heads, lengths)
    got = batch.run(CpuAttentionBackend)
    assert _error(got, batch.reference()) < TOLERANCE
    assert _error(got, batch.reference(sees_ahead=1)) > 100 * TOLERANCE


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_decode_is_attention_of_the_last_token(heads: Heads) -> None:
    """Each sequence's one new token reads its whole sequence."""
    batch = _batch(heads, [(900, 1), (1, 1), (0, 1), (77, 1)])
    got = batch.run(CpuAttentionBackend, decode=True)
    assert _error(got, batch.reference()) < TOLERANCE


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("decode", [False, True])
def test_fp8_is_read_as_the_numbers_that_it_holds(heads: Heads, decode: bool) -> None:
    """Keys and values of eight bits are decoded; the bits read as other numbers are far off."""
    lengths = [(900, 1), (12, 1)] if decode else BATCHES["mixed"]
    batch = _batch(heads, lengths)
    packed = {name: getattr(batch, name).to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    got = replace(batch, **packed).run(CpuAttentionBackend, decode=decode)
    assert _error(got, replace(batch, **packed).reference()) < TOLERANCE
    other = {name: cache.view(torch.float8_e5m2) for name, cache in packed.items()}
    assert _error(got, replace(batch, **other).reference()) > 100 * TOLERANCE


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_it_replaces_what_sglang_computes(heads: Heads) -> None:
    """SGLang's own back end gives the same numbers, with and without a prefix."""
    batch = _batch(heads, BATCHES["mixed"])
    sglangs = batch.run(TorchNativeAttnBackend).double()
    assert _error(batch.run(CpuAttentionBackend), sglangs) < TOLERANCE


def test_a_short_suffix_costs_its_own_rows_only() -> None:
    """One token after 2,000 takes one row of scores per head; SGLang's own computes 2,001."""
    heads = HEADS["mla"]
    batch = _batch(heads, [(2000, 1)])

    def work(backend: type[TorchNativeAttnBackend]) -> int:
        with FlopCounterMode(display=False) as counter:
            batch.run(backend)
        return counter.get_total_flops()

    needed = 2 * heads.queries * 2001 * (heads.dim + heads.value_dim)
    assert work(CpuAttentionBackend) == needed
    assert work(TorchNativeAttnBackend) > 1000 * needed
