"""The facts of a server: read from SGLang's own context, refused by name."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from re import findall
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.mem_cache.memory_pool import (
    KVCache,
    MHATokenToKVPool,
    NoOpMHATokenToKVPool,
)
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs
from transformers import LlamaConfig

from leyline_engine.contract import RotaryFacts, judge, this_plugin
from leyline_engine.rotary.fingerprint import model_fingerprint
from leyline_engine.rotary.measured_keys import Measured
from leyline_engine.rotary.rotation import Pairing, Rotary
from leyline_engine.rows.pool import SplicePool
from leyline_engine.sglang.facts.allow_list import Setup, refusals
from leyline_engine.sglang.facts.setup import EngineFacts, measure_modules, read_facts, read_setup
from leyline_engine.sglang.rows.layouts import read_pool


def rope(kind: str) -> Any:
    """A rotary module of SGLang's, by rope type."""
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    }
    scaling = {"default": None, "llama3": llama3}[kind]
    return get_rope(64, 64, 8192, 10000, True, scaling, torch.float32)


@pytest.fixture(autouse=True)
def fresh_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang shares rotary modules by their parameters; a test that spoils one spoils its own."""
    monkeypatch.setattr("sglang.srt.layers.rotary_embedding.factory._ROPE_DICT", {})


REFUSED: dict[str, tuple[object, str]] = {
    "version": ("0.6.0", "SGLang 0.6.0"),
    "kv_dtype": ("float8_e5m2", "KV dtype float8_e5m2"),
    "page_size": (8, "pages of 8 tokens"),
    "radix_cache": (False, "the radix cache is disabled"),
    "generates": (False, "no generating model"),
    "sparse_attention": (True, "sparse attention with an index key (DSA)"),
    "attention_kinds": (
        frozenset({"encoder_only", "cross attention"}),
        "attention that is not plain and causal: cross attention, encoder_only",
    ),
    "packed_states": (True, "recurrent states that are kept in eight bits"),
    "host_layout": ("page_head", "hierarchical cache in the layout page_head"),
    "host_storage": (True, "hierarchical cache with a storage back end, which no forget reaches"),
    "host_drafts": (True, "hierarchical cache beside speculative decoding"),
    "host_attention_dp": (True, "hierarchical cache beside data-parallel attention"),
    "external_cache": (True, "external KV cache"),
    "unified_memory": (True, "unified memory pool"),
    "kv_sharding": (True, "sharded KV cache"),
    "speculative": ("DFLASH", "speculative decoding (DFLASH: not tested)"),
    "draft_layers": (True, "speculative decoding with a model for each step"),
    "paged_trees": (True, "trees of drafts in pages of several tokens"),
    "relaxed_acceptance": (
        True,
        "speculative decoding that accepts what the model would not have chosen",
    ),
    "disaggregation": ("decode", "disaggregated prefill and decode"),
    "sessions": (True, "streaming sessions"),
    "diffusion": (True, "diffusion language model"),
    "pipeline_parallel": (2, "pipeline parallelism"),
    "context_parallel": (2, "context parallelism"),
}


NAMED = {"hybrid_window": "sliding windows", "recurrent": "recurrent layers"}
"""Kinds of state per sequence, which splice by themselves, as refusals call them."""


@pytest.mark.parametrize("kind", NAMED)
def test_state_is_refused_beside_what_cannot_move_it(kind: str) -> None:
    """A hierarchical cache and drafts leave state behind; both are named, and alone it splices."""
    setup = replace(Setup(), **{kind: True})
    assert refusals(setup) == ()
    for beside in ({"host_layout": "layer_first"}, {"speculative": "EAGLE"}):
        (refused,) = refusals(replace(setup, **beside))
        assert refused.what.endswith(f" beside {NAMED[kind]}")
        assert "drop --" in refused.fix


@pytest.mark.parametrize("name", [f.name for f in fields(Setup) if f.name not in NAMED])
def test_every_setting_that_is_not_covered_is_refused_by_name(name: str) -> None:
    """Each field alone turns splicing off, says so, and names a remedy; there is a row for each."""
    value, reason = REFUSED[name]
    (refused,) = refusals(replace(Setup(), **{name: value}))
    assert refused.what == reason
    assert refused.fix


def test_all_that_is_refused_is_named_at_once(tmp_path: Path) -> None:
    """The capability lists each refusal with its remedy, in the order of the list."""
    flags = {"speculative_algorithm": "DFLASH", "pp_size": 2}
    with get_context().override_server_args(**flags):
        context = context_of(Layers(), gqa_pool(), tmp_path)
        context.params.page_size = 24
        capability = facts_of(context).capability
    assert [(refused.what, refused.fix) for refused in capability.refusals] == [
        ("pages of 24 tokens", "start with --page-size 16"),
        (
            "speculative decoding (DFLASH: not tested)",
            "start with --speculative-algorithm EAGLE, EAGLE3, NEXTN or NGRAM, or without",
        ),
        ("pipeline parallelism", "start with --pp-size 1"),
    ]
    assert capability.unsupported_reason == "; ".join(each.what for each in capability.refusals)
    assert capability.unsupported_fix == "; ".join(each.fix for each in capability.refusals)


def test_remedies_name_flags_that_sglang_has() -> None:
    """Each flag is one of SGLang's own, spelt as its command line takes it."""
    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    every = Setup(**{name: value for name, (value, _) in REFUSED.items()})
    named = {flag for each in refusals(every) for flag in findall(r"--[a-z0-9-]+", each.fix)}
    assert len(named) >= 15
    assert named <= known


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_these_dtypes_are_not_refused(dtype: str) -> None:
    """The supported dtypes pass."""
    assert refusals(Setup(kv_dtype=dtype)) == ()


@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128])
def test_pages_of_these_sizes_are_not_refused(page_size: int) -> None:
    """Tokens per page for which splices are tested pass."""
    assert refusals(Setup(page_size=page_size)) == ()


class Attention(torch.nn.Module):
    """One layer's attention as SGLang's models have it: the rotary module beside RadixAttention."""

    def __init__(self, layer: int, rotary: Any) -> None:
        super().__init__()
        self.rotary = rotary
        self.attn = RadixAttention(4, 64, 1.0, 2, layer)


class Layers(torch.nn.Module):
    """Two such layers and a norm. It has no forward: nothing can be measured on it."""

    def __init__(self, first: str = "default", second: str | None = None) -> None:
        super().__init__()
        kinds = (first, second or first)
        self.layers = torch.nn.ModuleList(Attention(i, rope(k)) for i, k in enumerate(kinds))
        self.norm = torch.nn.LayerNorm(8, bias=False)


def context_of(model: torch.nn.Module, pool: KVCache, folder: Path, **changes: Any) -> Any:
    """SGLang's input to the factory of a tree cache, as far as facts are read from it."""
    allocator = SimpleNamespace(get_kvcache=lambda: pool)
    params = SimpleNamespace(
        token_to_kv_pool_allocator=allocator,
        page_size=1,
        disable=False,
        sliding_window_size=None,
        enable_session_radix_cache=False,
    )
    config = SimpleNamespace(
        is_generation=True,
        is_multimodal=False,
        hf_config=LlamaConfig(num_hidden_layers=2),
        model_path=str(folder),
        dtype=torch.float32,
        vocab_size=100,
        context_len=8192,
    )
    runner = SimpleNamespace(model=model, device="cpu")
    context = SimpleNamespace(
        params=params,
        model_config=config,
        tp_worker=SimpleNamespace(model_runner=runner),
        disable_radix_cache=False,
        is_hybrid_swa=False,
        is_hybrid_ssm=False,
        is_dsa=False,
        enable_hierarchical_cache=False,
    )
    for name, value in changes.items():
        setattr(context, name, value)
    return context


def facts_of(context: Any) -> EngineFacts:
    """The facts of a context without a tree: no probe can run."""
    return read_facts(context, None)


def facts_by_modules(context: Any, **options: Any) -> EngineFacts:
    """The facts of a context whose model is measured on its rotary modules alone."""

    def measure(context: Any, _tree: Any, _dtype: torch.dtype, _parts: object) -> list[Measured]:
        model = context.tp_worker.model_runner.model
        rotary = measure_modules(model, 8192, torch.float32)
        facts = RotaryFacts(
            rope_type="default", pairing="half_split", rotary_dim=64, inv_freq_digest="d"
        )
        return [Measured(rotary, 0, facts)]

    return read_facts(context, None, measure=measure, **options)


def gqa_pool(dtype: torch.dtype = torch.float32, layers: int = 2) -> MHATokenToKVPool:
    """A small pool."""
    return MHATokenToKVPool(32, 1, dtype, 2, 64, layers, "cpu", False)


@pytest.fixture
def published() -> Iterator[None]:
    """A plain server's configuration, as SGLang publishes it in a scheduler."""
    with get_context().override_server_args(served_model_name="tiny"):
        yield


@pytest.mark.usefixtures("published")
def test_a_supported_engine_is_described_whole(tmp_path: Path) -> None:
    """Capability, rotation and pool come from what was measured and from SGLang's pool."""
    facts = facts_by_modules(context_of(Layers(), gqa_pool(), tmp_path))
    capability = facts.capability
    assert capability.splices, capability.unsupported_reason
    assert (capability.unsupported_reason, capability.refusals) == ("", ())
    assert (capability.engine, capability.model) == ("sglang", "tiny")
    assert capability.engine_version == capability.engine_label == "sglang 0.5.23"
    assert capability.plugin == this_plugin()
    assert judge(capability) is None
    assert capability.architecture == "Layers"
    assert (capability.vocab_size, capability.max_context) == (100, 8192)
    assert capability.kv is not None
    assert capability.kv.pool_class == "gqa"
    assert (capability.kv.layers, capability.kv.capacity_tokens) == (2, 32)
    assert capability.kv.bytes_per_token == 2 * 2 * 2 * 64 * 4
    assert capability.rotary is not None
    assert facts.pool is not None
    assert facts.rotary is not None
    assert facts.pool.origins == capability.kv.origin_tokens == 4
    assert capability.kv.origin_bytes == facts.pool.bytes_beside > 4 * 2 * 2 * 64 * 4


@pytest.mark.usefixtures("published")
def test_the_ring_of_keys_of_eight_bits_is_capped(tmp_path: Path) -> None:
    """Too few bytes for as-computed keys, or a second scale in a layer, are named."""
    model, pool = Layers(), gqa_pool(torch.float8_e4m3fn)
    kv = facts_by_modules(context_of(model, pool, tmp_path)).capability.kv
    assert kv is not None
    assert (kv.dtype, kv.bytes_per_token, kv.origin_tokens) == ("float8_e4m3fn", 512, 32)
    capped = facts_by_modules(context_of(model, pool, tmp_path), origin_bytes=100)
    assert "LEYLINE_ORIGIN_BYTES allows 100" in capped.capability.unsupported_reason
    model.layers[1].attn.k_scale = torch.ones(2)
    scaled = facts_by_modules(context_of(model, pool, tmp_path))
    assert scaled.capability.unsupported_reason == "more than one KV scale per layer"


def refused_pools() -> dict[str, tuple[KVCache, str]]:
    """Pools that rows aren't spliced in."""
    return {
        "fp8": (gqa_pool(torch.float8_e5m2), "KV dtype float8_e5m2"),
        "subclass": (
            NoOpMHATokenToKVPool(32, 1, torch.float32, 2, 64, 2, "cpu", False),
            "KV pool class NoOpMHATokenToKVPool",
        ),
        "layers": (gqa_pool(layers=3), "layers of the KV pool without an attention of their own"),
    }


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize("name", refused_pools())
def test_a_pool_that_is_not_covered_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """The engine still gets its facts; they say why it doesn't splice."""
    pool, reason = refused_pools()[name]
    facts = facts_of(context_of(Layers(), pool, tmp_path))
    assert not facts.capability.splices
    assert facts.capability.unsupported_reason == reason
    assert facts == EngineFacts(facts.capability)


@pytest.mark.usefixtures("published")
def test_what_the_context_says_is_heeded(tmp_path: Path) -> None:
    """Sparse attention, sessions, pages and a disabled cache are read."""
    model, pool = Layers(), gqa_pool()
    for name, reason in {
        "is_dsa": "sparse attention with an index key (DSA)",
        "disable_radix_cache": "the radix cache is disabled",
    }.items():
        facts = facts_of(context_of(model, pool, tmp_path, **{name: True}))
        assert facts.capability.unsupported_reason == reason
    for name, value, reason in (
        ("page_size", 256, "pages of 256 tokens"),
        ("enable_session_radix_cache", True, "streaming sessions"),
    ):
        context = context_of(model, pool, tmp_path)
        setattr(context.params, name, value)
        assert facts_of(context).capability.unsupported_reason == reason


SETTINGS: dict[str, tuple[object, str]] = {
    "speculative_algorithm": ("DSPARK", "speculative decoding (DSPARK: not tested)"),
    "enable_multi_layer_eagle": (True, "speculative decoding with a model for each step"),
    "disaggregation_mode": ("prefill", "disaggregated prefill and decode"),
    "enable_unified_cache_external_linker": (True, "external KV cache"),
    "enable_lmcache": (True, "external KV cache"),
    "enable_flexkv": (True, "external KV cache"),
    "enable_streaming_session": (True, "streaming sessions"),
    "enable_hisparse": (True, "sparse attention with an index key (DSA)"),
    "enable_unified_memory": (True, "unified memory pool"),
    "enable_kv_cache_sharding": (True, "sharded KV cache"),
    "dllm_algorithm": ("LowConfidence", "diffusion language model"),
    "pp_size": (2, "pipeline parallelism"),
    "attn_cp_size": (2, "context parallelism"),
    "dcp_size": (2, "context parallelism"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_the_server_was_started_with_is_heeded(name: str, tmp_path: Path) -> None:
    """Flags are read from SGLang's resolved configuration, under its own names."""
    value, reason = SETTINGS[name]
    with get_context().override_server_args(**{name: value}):
        facts = facts_of(context_of(Layers(), gqa_pool(), tmp_path))
    assert facts.capability.unsupported_reason == reason


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "NGRAM"])
@pytest.mark.parametrize(("branches", "page"), [(2, 16), (2, 1), (1, 16)])
def test_trees_of_drafts_need_pages_of_one_token(
    algorithm: str, branches: int, page: int, tmp_path: Path
) -> None:
    """No SGLang on a CPU has trees in larger pages, so that no test can run them."""
    flags = {"speculative_algorithm": algorithm, "speculative_eagle_topk": branches}
    with get_context().override_server_args(**flags):
        context = context_of(Layers(), gqa_pool(), tmp_path)
        context.params.page_size = page
        found = [refused.what for refused in refusals(read_setup(context))]
    refused = (branches, page) == (2, 16)
    assert found == ["trees of drafts in pages of several tokens"] * refused


@pytest.mark.parametrize("flags", [{"dp_size": 3}, {"attn_dp_size": 3}])
def test_replicas_are_counted(flags: dict[str, int], tmp_path: Path) -> None:
    """The capability document gives the number of data-parallel replicas at one address, ranks of
    data-parallel attention included."""
    with get_context().override_server_args(**flags):
        facts = facts_of(context_of(Layers(), gqa_pool(), tmp_path))
    assert facts.capability.data_parallel == 3


@pytest.mark.usefixtures("published")
def test_what_single_layers_do_is_heeded(tmp_path: Path) -> None:
    """Cross attention in one layer is enough."""
    crossed = Layers()
    crossed.layers[1].attn.is_cross_attention = True
    facts = facts_of(context_of(crossed, gqa_pool(), tmp_path))
    reason = "attention that is not plain and causal: cross attention"
    assert facts.capability.unsupported_reason == reason


@pytest.mark.usefixtures("published")
def test_a_model_that_cannot_be_measured_is_served_without_splicing(tmp_path: Path) -> None:
    """A surprise in the model is no reason to fail the server."""
    facts = facts_of(context_of(Layers(), gqa_pool(), tmp_path))
    assert facts.capability.unsupported_reason == "the model can't be measured (AttributeError)"
    assert not facts.capability.splices


@pytest.mark.usefixtures("published")
def test_ranks_splice_together_or_not_at_all(tmp_path: Path) -> None:
    """A rank whose keys were explained splices only where all ranks' keys were."""
    refused = facts_of(context_of(Layers(), gqa_pool(), tmp_path))
    tensors = read_pool(gqa_pool()).turning(0, 64)
    rotary = Rotary(torch.ones(32), Pairing.HALF_SPLIT)
    capability = msgspec.structs.replace(
        refused.capability, splices=True, reuse_within=True, unsupported_reason=""
    )
    measured = EngineFacts(capability, rotary, SplicePool(tensors, rotary))
    asked: list[bool] = []

    def another_failed(succeeded: bool) -> bool:
        asked.append(succeeded)
        return False

    assert measured.agreed(bool) is measured
    together = measured.agreed(another_failed)
    assert (together.pool, together.rotary, together.capability.splices) == (None, None, False)
    assert "another tensor-parallel rank" in together.capability.unsupported_reason
    assert not together.capability.reuses
    assert refused.agreed(another_failed) is refused
    assert asked == [True, False]


def test_fingerprints_tell_models_apart_and_ranks_agree(tmp_path: Path) -> None:
    """Weights, configuration and settings count; the folder's name doesn't."""
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights" * 100)
    model = Layers()
    config = {"hidden_size": 8, "_name_or_path": "one"}

    def digest(folder: Path, **changes: Any) -> str:
        return model_fingerprint(model, config | changes, str(folder), ("bfloat16",))

    same = digest(one)
    assert len(same) == 32
    assert digest(other, _name_or_path="other") == same
    assert digest(one, hidden_size=9) != same
    assert model_fingerprint(model, config, str(one), ("float16",)) != same
    (other / "model.safetensors").write_bytes(b"weights" * 99 + b"changed")
    assert digest(other) != same
    with torch.no_grad():
        model.norm.weight[3] += 1
    assert digest(one) != same


HOSTED: dict[str, tuple[object, str]] = {
    "hicache_mem_layout": (
        "page_first_direct",
        "hierarchical cache in the layout page_first_direct",
    ),
    "hicache_storage_backend": (
        "file",
        "hierarchical cache with a storage back end, which no forget reaches",
    ),
    "speculative_algorithm": ("EAGLE", "hierarchical cache beside speculative decoding"),
}


@pytest.mark.parametrize("name", HOSTED)
def test_what_is_refused_beside_a_hierarchical_cache_is_fine_without(
    name: str, tmp_path: Path
) -> None:
    """Flags of HiCache, and beside it, matter where it is on; the remedy names one of them."""
    value, reason = HOSTED[name]
    with get_context().override_server_args(served_model_name="tiny", **{name: value}):
        for hosted in (True, False):
            context = context_of(Layers(), gqa_pool(), tmp_path, enable_hierarchical_cache=hosted)
            assert (reason in [each.what for each in refusals(read_setup(context))]) is hosted
    (fix,) = (each.fix for each in refusals(replace(Setup(), host_storage=True)))
    assert fix == "drop --hicache-storage-backend"
