"""The SGLang setups in which Leyline doesn't splice, each refused by name.

A model's name decides nothing: :mod:`.measuring` asks the loaded model itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from leyline_engine.admit.plan import PAGE_SIZES
from leyline_engine.contract import SGLANG, Refusal, engine_versions, is_tested

KV_DTYPES = frozenset({"float32", "bfloat16", "float16", "float8_e4m3fn"})
HOST_LAYOUTS = frozenset({"layer_first", "page_first"})
"""Values of ``--hicache-mem-layout`` in which every token has a row per layer."""
_Row = tuple[object, str, str]
"""A condition, its name and its remedy."""
_OTHER_MODEL = "serve a model whose layers all have plain causal attention"
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

    version: str = engine_versions(SGLANG)[0]
    """SGLang's, without the part after a plus sign."""
    kv_dtype: str = "bfloat16"
    page_size: int = 1
    radix_cache: bool = True
    generates: bool = True
    hybrid_window: bool = False
    """True if layers with a sliding window keep its rows alone, in a pool of their own."""
    recurrent: bool = False
    packed_states: bool = False
    """True if the tree keeps recurrent states in fewer bits than requests do."""
    sparse_attention: bool = False
    attention_kinds: frozenset[str] = frozenset()
    """Features of single attention layers that plain causal attention doesn't have."""
    host_layout: str = ""
    """``--hicache-mem-layout`` of a hierarchical cache (HiCache); empty without one."""
    host_storage: bool = False
    """True if a hierarchical cache has a third tier: a storage back end."""
    host_drafts: bool = False
    """True for a hierarchical cache beside speculative decoding."""
    host_attention_dp: bool = False
    """True for a hierarchical cache beside data-parallel attention."""
    external_cache: bool = False
    """True with an external linker, LMCache or FlexKV: KV may come from and go to another store."""
    unified_memory: bool = False
    kv_sharding: bool = False
    speculative: str = ""
    """Name of the algorithm; empty for none."""
    draft_layers: bool = False
    """True if each step of a draft has a model of its own (``--enable-multi-layer-eagle``)."""
    paged_trees: bool = False
    """True if trees of drafts are kept in pages of several tokens: no SGLang on a CPU does that."""
    relaxed_acceptance: bool = False
    """True if drafts are accepted that the model wouldn't have chosen."""
    disaggregation: str = "null"
    sessions: bool = False
    """True with streaming sessions or the session radix cache."""
    diffusion: bool = False
    pipeline_parallel: int = 1
    context_parallel: int = 1
    """Number of ranks that share one sequence's attention, in prefill or in decode."""


def refusals(setup: Setup) -> tuple[Refusal, ...]:
    """Return all that keeps ``setup`` from splicing, each with its remedy; empty if it can."""
    rows = (*_rows_of_model(setup), *_rows_of_server(setup))
    return tuple(Refusal(what, fix) for applies, what, fix in rows if applies)


def _rows_of_model(setup: Setup) -> tuple[_Row, ...]:
    kinds = ", ".join(sorted(setup.attention_kinds))
    return (
        (
            setup.sparse_attention,
            "sparse attention with an index key (DSA)",
            "serve a model without DSA, and drop --enable-hisparse",
        ),
        (
            setup.attention_kinds,
            f"attention that is not plain and causal: {kinds}",
            _OTHER_MODEL,
        ),
        (
            not setup.generates,
            "no generating model",
            "drop --is-embedding, or serve a generating model",
        ),
        (setup.diffusion, "diffusion language model", "drop --dllm-algorithm"),
    )


def _rows_of_server(setup: Setup) -> tuple[_Row, ...]:
    return (
        (
            not is_tested(SGLANG, setup.version),
            f"SGLang {setup.version}",
            f"install SGLang {' or '.join(engine_versions(SGLANG))}",
        ),
        (not setup.radix_cache, "the radix cache is disabled", "drop --disable-radix-cache"),
        (
            setup.kv_dtype not in KV_DTYPES,
            f"KV dtype {setup.kv_dtype}",
            "start with --kv-cache-dtype bf16",
        ),
        (
            setup.page_size not in PAGE_SIZES,
            f"pages of {setup.page_size} tokens",
            f"start with --page-size {_nearest_page(setup.page_size)}",
        ),
        *_hierarchical(setup),
        *_beside_state(setup),
        (
            setup.external_cache,
            "external KV cache",
            "drop --enable-lmcache, --enable-flexkv and --enable-unified-cache-external-linker",
        ),
        (setup.unified_memory, "unified memory pool", "drop --enable-unified-memory"),
        (setup.kv_sharding, "sharded KV cache", "drop --enable-kv-cache-sharding"),
        *_speculative(setup),
        (
            setup.disaggregation != "null",
            "disaggregated prefill and decode",
            "drop --disaggregation-mode",
        ),
        (
            setup.sessions,
            "streaming sessions",
            "drop --enable-streaming-session and --enable-session-radix-cache",
        ),
        (setup.pipeline_parallel != 1, "pipeline parallelism", "start with --pp-size 1"),
        (
            setup.context_parallel != 1,
            "context parallelism",
            "start with --attn-cp-size 1 and --dcp-size 1",
        ),
    )


def _hierarchical(setup: Setup) -> tuple[_Row, ...]:
    """Return refusals because of a hierarchical cache (HiCache), with what lifts them."""
    without = "drop --enable-hierarchical-cache"
    return (
        (
            setup.host_layout and setup.host_layout not in HOST_LAYOUTS,
            f"hierarchical cache in the layout {setup.host_layout}",
            "start with --hicache-mem-layout layer_first, or with page_first and "
            "--hicache-io-backend kernel",
        ),
        (
            setup.host_storage,
            "hierarchical cache with a storage back end, which no forget reaches",
            "drop --hicache-storage-backend",
        ),
        (
            setup.host_drafts,
            "hierarchical cache beside speculative decoding",
            f"{without} or --speculative-algorithm",
        ),
        (
            setup.host_attention_dp,
            "hierarchical cache beside data-parallel attention",
            f"{without} or --enable-dp-attention",
        ),
    )


def _beside_state(setup: Setup) -> tuple[_Row, ...]:
    """Return refusals of what no state per sequence can follow, with what lifts them."""
    kinds = ((setup.hybrid_window, "sliding windows"), (setup.recurrent, "recurrent layers"))
    state = " and ".join(kind for present, kind in kinds if present)
    lift = "" if setup.recurrent else " or start with --disable-hybrid-swa-memory"
    return (
        (
            state and setup.host_layout,
            f"hierarchical cache beside {state}",
            f"drop --enable-hierarchical-cache{lift}",
        ),
        (
            state and setup.speculative,
            f"speculative decoding beside {state}",
            f"drop --speculative-algorithm{lift}",
        ),
        (
            setup.packed_states,
            "recurrent states that are kept in eight bits",
            "drop --enable-int8-mamba-checkpoint",
        ),
    )


def _nearest_page(size: int) -> int:
    """Return the supported size of a page that is nearest to ``size``."""
    return min(sorted(PAGE_SIZES), key=lambda supported: abs(supported - size))


def _speculative(setup: Setup) -> tuple[_Row, ...]:
    """Return refusals because of speculative decoding, with what lifts them."""
    why = SPECULATIVE.get(setup.speculative, "unknown to Leyline")
    return (
        (
            why,
            f"speculative decoding ({setup.speculative}: {why})",
            "start with --speculative-algorithm EAGLE, EAGLE3, NEXTN or NGRAM, or without",
        ),
        (
            setup.draft_layers,
            "speculative decoding with a model for each step",
            "drop --enable-multi-layer-eagle",
        ),
        (
            setup.paged_trees,
            "trees of drafts in pages of several tokens",
            "start with --page-size 1, --speculative-eagle-topk 1 or, with NGRAM, "
            "--speculative-ngram-max-bfs-breadth 1",
        ),
        (
            setup.relaxed_acceptance,
            "speculative decoding that accepts what the model would not have chosen",
            "drop --speculative-accept-threshold-single and --speculative-accept-threshold-acc",
        ),
    )
