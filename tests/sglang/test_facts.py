"""The facts of a model, a pool and a server: read from SGLang's own modules, refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.mem_cache.memory_pool import (
    KVCache,
    MHATokenToKVPool,
    MLATokenToKVPool,
    NoOpMHATokenToKVPool,
)
from sglang.srt.runtime_context import get_context
from transformers import LlamaConfig

from leyline_engine.rotation import Pairing
from leyline_engine.sglang.facts.allow_list import ARCHITECTURES, Setup, refusal
from leyline_engine.sglang.facts.rotary import UnsupportedRotaryError, measure_rotary
from leyline_engine.sglang.facts.setup import EngineFacts, model_fingerprint, read_facts

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 2048,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
DEEPSEEK = YARN | {"rope_type": "deepseek_yarn", "mscale": 0.707, "mscale_all_dim": 0.3}
KINDS: dict[str, tuple[dict[str, Any] | None, bool, int, str]] = {
    "default": (None, True, 64, "default"),
    "interleaved": (None, False, 64, "default"),
    "partial": (None, True, 48, "default"),
    "linear": ({"rope_type": "linear", "factor": 2.5}, True, 64, "linear"),
    "llama3": (LLAMA3, True, 64, "llama3"),
    "yarn": (YARN, True, 64, "yarn"),
    "deepseek": (DEEPSEEK, False, 64, "yarn"),
}


def rope(kind: str, dtype: torch.dtype = torch.float32, head: int = 64) -> Any:
    """A rotary module of SGLang's; the tables that it keeps are made again for each test."""
    scaling, neox, width, _ = KINDS[kind]
    return get_rope(head, width, 8192, 10000, neox, scaling, dtype)


@pytest.fixture(autouse=True)
def fresh_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang shares rotary modules by their parameters; a test that spoils one spoils its own."""
    monkeypatch.setattr("sglang.srt.layers.rotary_embedding.factory._ROPE_DICT", {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_measured_facts_predict_what_the_module_does(kind: str, dtype: torch.dtype) -> None:
    """Keys moved by the facts are those that the module computes at the new position."""
    module = rope(kind, dtype)
    rotary, facts = measure_rotary([module, module], dtype, CPU)
    _, neox, width, rope_type = KINDS[kind]
    pairing = Pairing.HALF_SPLIT if neox else Pairing.INTERLEAVED
    assert (facts.rope_type, facts.pairing, facts.rotary_dim) == (rope_type, pairing, width)
    here, there = torch.tensor([5000, 17, 8000]), torch.tensor([4100, 7900, 3])
    keys = torch.randn(3, 2, 64).to(dtype)
    _, at_here = module(here, keys.clone(), keys.clone())
    _, at_there = module(there, keys.clone(), keys.clone())
    moved = rotary.rotate(at_here[..., :width], here, there).float()
    scale = at_there.float().abs().max()
    # Fresh keys carry the roundings of the table, the product and the sum.
    tolerance = {torch.float32: 2e-3, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    assert (moved - at_there[..., :width].float()).abs().max() <= tolerance * scale
    wrong = replace(rotary, inv_freq=rotary.inv_freq * 1.01)
    off = wrong.rotate(at_here[..., :width], here, there).float()
    assert (off - at_there[..., :width].float()).abs().max() > 5 * tolerance * scale


def test_attention_scaling_is_reported_and_not_applied() -> None:
    """YaRN's mscale is in the key already: facts name it, the rotation keeps lengths."""
    module = rope("deepseek")
    rotary, facts = measure_rotary([module], torch.float32, CPU)
    assert facts.attention_scaling == pytest.approx(module.mscale)
    assert abs(facts.attention_scaling - 1) > 0.01
    keys = torch.randn(4, 1, 64)
    moved = rotary.rotate(keys, torch.zeros(4, dtype=torch.int64), torch.arange(4) * 999)
    assert torch.allclose(moved.norm(dim=-1), keys.norm(dim=-1), rtol=1e-5)


@pytest.mark.parametrize(
    ("scaling", "name"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "DynamicNTKScalingRotaryEmbedding"),
        ({"rope_type": "dynamic", "alpha": 2.0}, "DynamicNTKAlphaRotaryEmbedding"),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 32,
                "long_factor": [2.0] * 32,
                "original_max_position_embeddings": 2048,
            },
            "Phi3LongRoPEScaledRotaryEmbedding",
        ),
        ({"rope_type": "default", "mrope_section": [8, 12, 12]}, "MRotaryEmbedding"),
        ({"rope_type": "proportional"}, "Gemma4RotaryEmbedding"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_rotary_embeddings_are_refused_by_name(scaling: dict[str, Any], name: str) -> None:
    """Only exact classes that are known are measured at all."""
    module = get_rope(64, 64, 8192, 10000, True, scaling, torch.float32)
    with pytest.raises(UnsupportedRotaryError, match=name):
        measure_rotary([module], torch.float32, CPU)


def _another_table(module: Any) -> None:
    module.cos_sin_cache = module.cos_sin_cache.roll(1, dims=0)


def _not_a_number(module: Any) -> None:
    module.cos_sin_cache = module.cos_sin_cache * float("nan")


def _no_turn(module: Any) -> None:
    module._forward_method = lambda positions, query, key: (query, key)


def _turn_back(module: Any) -> None:
    forward = module._forward_method
    module._forward_method = lambda positions, query, key: forward(
        positions.max() - positions, query, key
    )


@pytest.mark.parametrize("spoil", [_another_table, _not_a_number, _no_turn, _turn_back])
def test_a_module_that_does_not_do_what_it_says_is_refused(spoil: Any) -> None:
    """Control: facts are measured, so a module that lies about itself is found out."""
    module = rope("default")
    measure_rotary([module], torch.float32, CPU)
    spoil(module)
    with pytest.raises(UnsupportedRotaryError, match=r"cached cosines|no one rotation"):
        measure_rotary([module], torch.float32, CPU)


def test_layers_must_agree() -> None:
    """Layers that turn differently, or not at all, can't share one rotation."""
    with pytest.raises(UnsupportedRotaryError, match="differ"):
        measure_rotary([rope("default"), rope("llama3")], torch.float32, CPU)
    with pytest.raises(UnsupportedRotaryError, match="differ"):
        measure_rotary([rope("default"), rope("interleaved")], torch.float32, CPU)
    for modules in ([rope("default"), None], []):
        with pytest.raises(UnsupportedRotaryError, match="without a rotary embedding"):
            measure_rotary(modules, torch.float32, CPU)


REFUSED: dict[str, tuple[object, str]] = {
    "architecture": ("SmolLM3ForCausalLM", "architecture SmolLM3ForCausalLM"),
    "kv_dtype": ("float8_e4m3fn", "KV dtype float8_e4m3fn"),
    "page_size": (8, "pages of 8 tokens"),
    "radix_cache": (False, "the radix cache is disabled"),
    "generates": (False, "no generating model"),
    "multimodal": (True, "multimodal model (M-RoPE)"),
    "hybrid_window": (True, "layers with a sliding window"),
    "recurrent": (True, "recurrent layers"),
    "sparse_attention": (True, "sparse attention with an index key (DSA)"),
    "attention_kinds": (
        frozenset({"sliding window", "cross attention"}),
        "attention that is not plain and causal: cross attention, sliding window",
    ),
    "hierarchical_cache": (True, "hierarchical cache (HiCache)"),
    "external_cache": (True, "external KV cache"),
    "unified_memory": (True, "unified memory pool"),
    "kv_sharding": (True, "sharded KV cache"),
    "lora": (True, "LoRA"),
    "speculative": (
        "DFLASH",
        "speculative decoding (DFLASH: not tested); "
        "--speculative-algorithm may be EAGLE, EAGLE3, NEXTN or NGRAM",
    ),
    "draft_layers": (True, "speculative decoding with --enable-multi-layer-eagle"),
    "relaxed_acceptance": (
        True,
        "speculative decoding with --speculative-accept-threshold-single or -acc below 1",
    ),
    "disaggregation": ("decode", "disaggregated prefill and decode"),
    "sessions": (True, "streaming sessions"),
    "diffusion": (True, "diffusion language model"),
    "pipeline_parallel": (2, "pipeline parallelism"),
    "context_parallel": (2, "context parallelism"),
    "attention_data_parallel": (2, "data-parallel attention"),
}


@pytest.mark.parametrize("name", [field.name for field in fields(Setup)])
def test_every_setting_that_is_not_covered_is_refused_by_name(name: str) -> None:
    """Each field alone turns splicing off and says so; there is a row for each."""
    value, reason = REFUSED[name]
    assert refusal(replace(Setup(), **{name: value})) == reason


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_on_the_list_is_not_refused(architecture: str, dtype: str) -> None:
    """The supported models and dtypes pass."""
    assert refusal(Setup(architecture=architecture, kv_dtype=dtype)) == ""


@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128])
def test_pages_of_these_sizes_are_not_refused(page_size: int) -> None:
    """Tokens per page for which splices are tested pass."""
    assert refusal(Setup(page_size=page_size)) == ""


class Attention(torch.nn.Module):
    """One layer's attention as SGLang's models have it: the rotary module beside RadixAttention."""

    def __init__(self, layer: int, rotary: Any) -> None:
        super().__init__()
        self.rotary_emb = rotary
        self.attn = RadixAttention(4, 64, 1.0, 2, layer)


class LlamaForCausalLM(torch.nn.Module):
    """Two such layers and a norm, under a name on the list."""

    def __init__(self, kind: str = "default", *, other: str | None = None) -> None:
        super().__init__()
        kinds = (kind, other or kind)
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
    """Capability, rotation and pool come from the model's modules and its pool."""
    facts = read_facts(context_of(LlamaForCausalLM("yarn"), gqa_pool(), tmp_path))
    capability = facts.capability
    assert capability.splices, capability.unsupported_reason
    assert capability.unsupported_reason == ""
    assert (capability.engine, capability.model) == ("sglang", "tiny")
    assert capability.engine_version == "sglang 0.5.23"
    assert capability.architecture == "LlamaForCausalLM"
    assert (capability.vocab_size, capability.max_context) == (100, 8192)
    assert capability.kv is not None
    assert capability.kv.pool_class == "gqa"
    assert (capability.kv.layers, capability.kv.capacity_tokens) == (2, 32)
    assert capability.kv.bytes_per_token == 2 * 2 * 2 * 64 * 4
    assert capability.rotary is not None
    assert capability.rotary.rope_type == "yarn"
    assert facts.pool is not None
    assert facts.rotary is not None
    assert facts.pool.origins == 4


def refused_pools() -> dict[str, tuple[KVCache, str]]:
    """Pools that rows aren't spliced in."""
    return {
        "fp8": (gqa_pool(torch.float8_e4m3fn), "KV dtype float8_e4m3fn"),
        "subclass": (
            NoOpMHATokenToKVPool(32, 1, torch.float32, 2, 64, 2, "cpu", False),
            "KV pool class NoOpMHATokenToKVPool",
        ),
        "mla": (
            MLATokenToKVPool(32, 1, torch.float32, 64, 16, 2, "cpu", False),
            "the pool keeps 16 rotary dimensions, the model turns 64",
        ),
        "layers": (gqa_pool(layers=3), "layers of the KV pool without an attention of their own"),
    }


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize("name", refused_pools())
def test_a_pool_that_is_not_covered_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """The engine still gets its facts; they say why it doesn't splice."""
    pool, reason = refused_pools()[name]
    facts = read_facts(context_of(LlamaForCausalLM(), pool, tmp_path))
    assert not facts.capability.splices
    assert facts.capability.unsupported_reason == reason
    assert facts == EngineFacts(facts.capability)


@pytest.mark.usefixtures("published")
def test_what_the_context_says_is_heeded(tmp_path: Path) -> None:
    """Hybrid models, sparse attention, HiCache, sessions, pages and a disabled cache are read."""
    model, pool = LlamaForCausalLM(), gqa_pool()
    for name, reason in {
        "is_hybrid_swa": "layers with a sliding window",
        "is_hybrid_ssm": "recurrent layers",
        "is_dsa": "sparse attention with an index key (DSA)",
        "enable_hierarchical_cache": "hierarchical cache (HiCache)",
        "disable_radix_cache": "the radix cache is disabled",
    }.items():
        facts = read_facts(context_of(model, pool, tmp_path, **{name: True}))
        assert facts.capability.unsupported_reason == reason
    for name, value, reason in (
        ("page_size", 256, "pages of 256 tokens"),
        ("enable_session_radix_cache", True, "streaming sessions"),
        ("sliding_window_size", 512, "layers with a sliding window"),
    ):
        context = context_of(model, pool, tmp_path)
        setattr(context.params, name, value)
        assert read_facts(context).capability.unsupported_reason == reason
    context = context_of(model, pool, tmp_path)
    context.model_config.is_multimodal = True
    assert read_facts(context).capability.unsupported_reason == "multimodal model (M-RoPE)"


SETTINGS: dict[str, tuple[object, str]] = {
    "enable_lora": (True, "LoRA"),
    "speculative_algorithm": ("EAGLE", "EAGLE without a draft worker in this process"),
    "enable_multi_layer_eagle": (True, "speculative decoding with --enable-multi-layer-eagle"),
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
    "attn_dp_size": (2, "data-parallel attention"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_the_server_was_started_with_is_heeded(name: str, tmp_path: Path) -> None:
    """Flags are read from SGLang's resolved configuration, under its own names."""
    value, reason = SETTINGS[name]
    with get_context().override_server_args(**{name: value}):
        facts = read_facts(context_of(LlamaForCausalLM(), gqa_pool(), tmp_path))
    assert facts.capability.unsupported_reason == reason


def test_replicas_are_counted(tmp_path: Path) -> None:
    """The capability document gives the number of data-parallel replicas at one address."""
    with get_context().override_server_args(dp_size=3):
        facts = read_facts(context_of(LlamaForCausalLM(), gqa_pool(), tmp_path))
    assert facts.capability.data_parallel == 3
    assert facts.capability.splices, facts.capability.unsupported_reason


@pytest.mark.usefixtures("published")
def test_what_single_layers_do_is_heeded(tmp_path: Path) -> None:
    """A window, missing rotation or another rotation in one layer is enough."""
    windowed = LlamaForCausalLM()
    windowed.layers[1].attn.sliding_window_size = 128
    unturned = LlamaForCausalLM()
    unturned.layers[1].rotary_emb = None
    for model, reason in (
        (windowed, "attention that is not plain and causal: sliding window"),
        (unturned, "layers without a rotary embedding"),
        (LlamaForCausalLM("default", other="llama3"), "the layers' rotary embeddings differ"),
    ):
        facts = read_facts(context_of(model, gqa_pool(), tmp_path))
        assert facts.capability.unsupported_reason == reason


@pytest.mark.usefixtures("published")
def test_a_model_that_cannot_be_measured_is_served_without_splicing(tmp_path: Path) -> None:
    """A surprise in the model's modules is no reason to fail the server."""
    model = LlamaForCausalLM()
    model.layers[0].rotary_emb.cos_sin_cache = None
    facts = read_facts(context_of(model, gqa_pool(), tmp_path))
    assert facts.capability.unsupported_reason.startswith("the model can't be measured (")


def test_fingerprints_tell_models_apart_and_ranks_agree(tmp_path: Path) -> None:
    """Weights, configuration and settings count; the folder's name doesn't."""
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights" * 100)
    model = LlamaForCausalLM()
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
