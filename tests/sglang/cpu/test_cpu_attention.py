"""Attention on the CPU equals the textbook's, computed in float64."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
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
    layer: dict[str, Any] = field(default_factory=dict)
    sinks: Tensor | None = None

    def run(self, backend: type[TorchNativeAttnBackend], *, decode: bool = False) -> Tensor:
        """The backend's output ``[tokens, heads, value_dim]``."""
        heads = self.heads
        pool = SimpleNamespace(
            get_key_buffer=lambda _: self.k_cache, get_value_buffer=lambda _: self.v_cache
        )
        instance = backend(self.runner(pool))
        layer = RadixAttention(
            heads.queries,
            heads.dim,
            self.scale,
            heads.keys,
            0,
            v_head_dim=heads.value_dim,
            **self.layer,
        )
        options = {} if self.sinks is None else {"sinks": self.sinks}
        forward = instance.forward_decode if decode else instance.forward_extend
        query = self.query.flatten(1)
        output = forward(query, None, None, layer, self.forward_batch(), False, **options)
        return output.view(-1, heads.queries, heads.value_dim)

    def runner(self, pool: Any) -> Any:
        """The parts of a model's runner that a backend reads."""
        requests = SimpleNamespace(req_to_token=self.req_to_token)
        return SimpleNamespace(device="cpu", req_to_token_pool=requests, token_to_kv_pool=pool)

    def forward_batch(self) -> Any:
        """The parts of a batch that a backend reads."""
        prefixes, new = (torch.tensor(column) for column in zip(*self.lengths, strict=True))
        return SimpleNamespace(
            forward_mode=ForwardMode.EXTEND,
            req_pool_indices=self.rows,
            seq_lens=prefixes + new,
            extend_prefix_lens=prefixes,
            extend_seq_lens=new,
            out_cache_loc=None,
            encoder_lens=None,
        )

    def reference(self, *, sees_ahead: int = 0) -> Tensor:
        """The textbook's answer in float64, one query at a time.

        ``sees_ahead`` lets each token read that many later ones, which is wrong.
        """
        results = []
        queries = iter(self.query.double())
        group = self.heads.queries // self.heads.keys
        window = self.layer.get("sliding_window_size", 10**9)
        cap = self.layer.get("logit_cap", 0.0)
        for row, (cached, new) in zip(self.rows.tolist(), self.lengths, strict=True):
            slots = self.req_to_token[row, : cached + new]
            keys = self.k_cache[slots].double().repeat_interleave(group, dim=1)
            values = self.v_cache[slots].double().repeat_interleave(group, dim=1)
            for position in range(cached, cached + new):
                seen = slice(max(0, position - window), position + 1 + sees_ahead)
                scores = torch.einsum("hd,thd->ht", next(queries), keys[seen]) * self.scale
                scores = cap * torch.tanh(scores / cap) if cap else scores
                shares = scores.exp() / (
                    scores.exp().sum(-1, keepdim=True)
                    + (0 if self.sinks is None else self.sinks.double().exp()[:, None])
                )
                results.append(torch.einsum("ht,thd->hd", shares, values[seen]))
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


@pytest.mark.parametrize(
    "layer",
    [
        {"sliding_window_size": 31},
        {"sliding_window_size": 1},
        {"logit_cap": 0.5},
        {"sliding_window_size": 300, "logit_cap": 2.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("decode", [False, True])
def test_layers_see_a_window_and_a_sink(layer: dict[str, Any], sinks: bool, decode: bool) -> None:
    """A layer may see a window alone, cap its scores, and leave a part of the softmax to a sink;
    without each the answer is far off."""
    lengths = [(900, 1), (1, 1), (40, 1)] if decode else [*BATCHES["mixed"], (0, 600)]
    sink = torch.randn(8) if sinks else None
    batch = replace(_batch(HEADS["gqa"], lengths), layer=layer, sinks=sink)
    got = batch.run(CpuAttentionBackend, decode=decode)
    assert _error(got, batch.reference()) < TOLERANCE
    for left_out in layer:
        rest = {name: value for name, value in layer.items() if name != left_out}
        assert _error(got, replace(batch, layer=rest).reference()) > 100 * TOLERANCE
    if sinks:
        assert _error(got, replace(batch, sinks=None).reference()) > 100 * TOLERANCE


@pytest.mark.parametrize("decode", [False, True])
def test_a_windows_rows_lie_in_a_pool_of_their_own(decode: bool) -> None:
    """Windowed layers read and write where their own pool has a token's row, others in the other
    pool; rows in front of every window are gone."""
    window, cached, new = 8, 50, 1 if decode else 5
    batch = replace(_batch(HEADS["mha"], [(cached, new)]), layer={"sliding_window_size": window})
    pool = SWAKVPool(
        cached + new, 20, 1, torch.float32, 4, 32, [1], [0], "cpu", enable_memory_saver=False
    )
    slots = batch.req_to_token[batch.rows[0], : cached + new].long()
    alive = slots[-window - new :]
    mapping = torch.zeros(cached + new + 2, dtype=torch.int64)
    mapping[alive] = torch.randperm(20)[: len(alive)] + 1
    pool.register_mapping(mapping)
    for buffers in (pool.full_kv_pool, pool.swa_kv_pool):
        buffers.k_buffer[0].normal_(), buffers.v_buffer[0].normal_()
    k, v = batch.k_cache, batch.v_cache
    old = slots[:-new]
    pool.full_kv_pool.k_buffer[0][old], pool.full_kv_pool.v_buffer[0][old] = k[old], v[old]
    kept = alive[:-new]
    pool.swa_kv_pool.k_buffer[0][mapping[kept]] = k[kept]
    pool.swa_kv_pool.v_buffer[0][mapping[kept]] = v[kept]
    backend = CpuAttentionBackend(batch.runner(pool))
    forward_batch = batch.forward_batch()
    forward_batch.out_cache_loc = slots[-new:]
    backend.init_forward_metadata(forward_batch)
    for number, size in ((0, -1), (1, window)):
        layer = RadixAttention(4, 32, batch.scale, 4, number, sliding_window_size=size)
        forward = backend.forward_decode if decode else backend.forward_extend
        fresh = slots[-new:]
        got = forward(batch.query.flatten(1), k[fresh], v[fresh], layer, forward_batch)
        expected = replace(batch, layer={} if size < 0 else batch.layer).reference()
        assert _error(got.view(-1, 4, 32), expected) < TOLERANCE


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
