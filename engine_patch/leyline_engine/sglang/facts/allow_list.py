"""The allow-list of SGLang setups in which Leyline splices; all others are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from leyline_engine.plan import PAGE_SIZES

ARCHITECTURES = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)
"""Model classes of SGLang that turn every key of every layer by their rotary module, once."""
KV_DTYPES = frozenset({"float32", "bfloat16", "float16"})
SPECULATIVE: Mapping[str, str] = {
    "": "",
    "EAGLE": "",
    "EAGLE3": "",
    "NGRAM": "",
    "STANDALONE": "its KV has read the token after each slot's own, which the tree doesn't key",
    "FROZEN_KV_MTP": "it reads the KV of models with sliding windows",
    "DFLASH": "not tested",
    "DSPARK": "not tested",
    "UNO": "not tested",
}
"""Algorithms of SGLang, NEXTN being EAGLE to it, and why one is refused; empty if it isn't."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A server's settings and a model's kind, as far as they decide on splicing.

    The defaults are a plain server of a supported model.
    """

    architecture: str = "LlamaForCausalLM"
    kv_dtype: str = "bfloat16"
    page_size: int = 1
    radix_cache: bool = True
    generates: bool = True
    multimodal: bool = False
    hybrid_window: bool = False
    recurrent: bool = False
    sparse_attention: bool = False
    attention_kinds: frozenset[str] = frozenset()
    """Features of single attention layers that plain causal attention doesn't have."""
    hierarchical_cache: bool = False
    external_cache: bool = False
    """True with an external linker, LMCache or FlexKV: KV may come from and go to another store."""
    unified_memory: bool = False
    kv_sharding: bool = False
    lora: bool = False
    speculative: str = ""
    """Name of the algorithm; empty for none."""
    draft_layers: bool = False
    """True if each step of a draft has a model of its own (``--enable-multi-layer-eagle``)."""
    relaxed_acceptance: bool = False
    """True if drafts are accepted that the model wouldn't have chosen."""
    disaggregation: str = "null"
    sessions: bool = False
    """True with streaming sessions or the session radix cache."""
    diffusion: bool = False
    pipeline_parallel: int = 1
    context_parallel: int = 1
    """Number of ranks that share one sequence's attention, in prefill or in decode."""
    attention_data_parallel: int = 1


def refusal(setup: Setup) -> str:
    """Return why ``setup`` can't splice, in words for an operator; empty if it can."""
    kinds = ", ".join(sorted(setup.attention_kinds))
    refusals = (
        (not setup.radix_cache, "the radix cache is disabled"),
        (setup.multimodal, "multimodal model (M-RoPE)"),
        (setup.sparse_attention, "sparse attention with an index key (DSA)"),
        (setup.hybrid_window, "layers with a sliding window"),
        (setup.recurrent, "recurrent layers"),
        (setup.attention_kinds, f"attention that is not plain and causal: {kinds}"),
        (not setup.generates, "no generating model"),
        (setup.diffusion, "diffusion language model"),
        (setup.architecture not in ARCHITECTURES, f"architecture {setup.architecture}"),
        (setup.kv_dtype not in KV_DTYPES, f"KV dtype {setup.kv_dtype}"),
        (setup.page_size not in PAGE_SIZES, f"pages of {setup.page_size} tokens"),
        (setup.hierarchical_cache, "hierarchical cache (HiCache)"),
        (setup.external_cache, "external KV cache"),
        (setup.unified_memory, "unified memory pool"),
        (setup.kv_sharding, "sharded KV cache"),
        (setup.lora, "LoRA"),
        *_speculative(setup),
        (setup.disaggregation != "null", "disaggregated prefill and decode"),
        (setup.sessions, "streaming sessions"),
        (setup.pipeline_parallel != 1, "pipeline parallelism"),
        (setup.context_parallel != 1, "context parallelism"),
        (setup.attention_data_parallel != 1, "data-parallel attention"),
    )
    return next((reason for applies, reason in refusals if applies), "")


def _speculative(setup: Setup) -> tuple[tuple[bool, str], ...]:
    """Return refusals because of speculative decoding, with what lifts them."""
    why = SPECULATIVE.get(setup.speculative, "unknown to Leyline")
    others = "--speculative-algorithm may be EAGLE, EAGLE3, NEXTN or NGRAM"
    return (
        (bool(why), f"speculative decoding ({setup.speculative}: {why}); {others}"),
        (setup.draft_layers, "speculative decoding with --enable-multi-layer-eagle"),
        (
            setup.relaxed_acceptance,
            "speculative decoding with --speculative-accept-threshold-single or -acc below 1",
        ),
    )
