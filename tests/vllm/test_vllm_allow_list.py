"""The vLLM setups that are refused by name."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import fields, replace
from re import findall
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from leyline_engine.vllm.facts.allow_list import Setup, refusals
from leyline_engine.vllm.facts.setup import read_setup

REFUSED: dict[str, tuple[object, str]] = {
    "version": ("0.33.0", "vLLM 0.33.0"),
    "kv_dtype": ("fp8", "KV dtype fp8"),
    "block_size": (8, "blocks of 8 tokens"),
    "hash_block_size": (8, "hashes of 8 tokens in blocks of 16"),
    "prefix_caching": (False, "prefix caching is off"),
    "mla_on_cpu": (True, "MLA on a CPU, where vLLM has no prefix caching"),
    "chunked_prefill": (False, "prompts that are never prefilled in parts"),
    "groups": (2, "2 groups of KV caches"),
    "attention_kinds": (
        frozenset({"sliding window", "mamba"}),
        "attention that is not plain and causal: mamba, sliding window",
    ),
    "sparse_attention": (True, "sparse attention with an index key (DSA)"),
    "fast_prefill": (True, "layers that skip prompts, as they share KV"),
    "generates": (False, "no generating model"),
    "encodes_only": (True, "only a multimodal encoder"),
    "prefix_lm": (True, "images whose tokens attend to each other in both directions"),
    "prompt_embeddings": (True, "prompts of embeddings in place of tokens"),
    "diffusion": (True, "diffusion language model"),
    "lookback": (True, "embeddings of several tokens (Engram)"),
    "speculative": ("eagle3", "speculative decoding (eagle3)"),
    "pipeline_parallel": (2, "pipeline parallelism"),
    "context_parallel": (2, "context parallelism"),
    "data_parallel": (2, "data parallelism"),
    "elastic": (True, "elastic expert parallelism"),
    "micro_batches": (True, "batches in two halves"),
    "connector": ("MultiConnector", "the KV connector MultiConnector"),
    "connector_role": ("kv_producer", "the KV connector's role kv_producer"),
    "kv_offloading": (True, "KV offloading"),
    "sleep_mode": (True, "sleep mode, which drops KV"),
    "replaced_weights": (True, "weights that may be replaced under their KV"),
    "routed_experts": (True, "routed experts in answers"),
    "scheduler_class": ("mine.Scheduler", "the scheduler mine.Scheduler"),
}


@pytest.mark.parametrize("name", [field.name for field in fields(Setup)])
def test_each_setting_alone_is_refused_by_its_name(name: str) -> None:
    """Each field turns splicing off, says so, and names a remedy; there is a row for each."""
    value, reason = REFUSED[name]
    (refused,) = refusals(replace(Setup(), **{name: value}))
    assert refused.what == reason
    assert refused.fix


def test_a_plain_server_is_not_refused() -> None:
    """The defaults pass, and so do all block sizes and dtypes that splices are planned for."""
    assert refusals(Setup()) == ()
    for size in (16, 32, 64, 128):
        assert refusals(Setup(block_size=size)) == ()
    for dtype in ("float32", "bfloat16", "float16"):
        assert refusals(Setup(kv_dtype=dtype)) == ()


def test_remedies_name_flags_of_vllm() -> None:
    """Each flag is one of vLLM's own, spelt as its command line takes it."""
    known = {
        option
        for action in EngineArgs.add_cli_args(ArgumentParser())._actions
        for option in action.option_strings
    }
    named = {
        flag
        for name, (value, _) in REFUSED.items()
        for each in refusals(replace(Setup(), **{name: value}))
        for flag in findall(r"--[a-z-]+", each.fix)
    }
    assert len(named) >= 20
    assert named <= known


_SHAPE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 32}
FULL = FullAttentionSpec(**_SHAPE, dtype=torch.bfloat16)
MLA = MLAAttentionSpec(**(_SHAPE | {"num_kv_heads": 1}), dtype=torch.bfloat16)


def config_of(**changes: Any) -> Any:
    """vLLM's configuration of a plain server, as far as the setup is read from it.

    ``changes`` are by section and name, as in ``cache__cache_dtype``.
    """
    sections: dict[str, dict[str, Any]] = {
        "model": {
            "dtype": torch.bfloat16,
            "multimodal_config": None,
            "use_mla": False,
            "hf_text_config": SimpleNamespace(),
            "runner_type": "generate",
            "is_encoder_decoder": False,
            "is_mm_prefix_lm": False,
            "supports_multimodal_inputs": False,
            "enable_prompt_embeds": False,
            "is_diffusion": False,
            "enable_sleep_mode": False,
        },
        "cache": {
            "block_size": 16,
            "hash_block_size": None,
            "cache_dtype": "auto",
            "enable_prefix_caching": True,
            "kv_sharing_fast_prefill": False,
            "kv_offloading_size": None,
        },
        "scheduler": {"enable_chunked_prefill": True, "scheduler_cls": None},
        "attention": {"use_non_causal": False, "hisparse_config": None},
        "parallel": {
            "pipeline_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "data_parallel_size": 1,
            "enable_elastic_ep": False,
            "use_ubatching": False,
        },
        "kv_transfer": {"kv_connector": "LeylineConnector", "kv_role": "kv_both"},
        "aux_output": {"enabled": False},
    }
    whole: dict[str, Any] = dict.fromkeys(
        ("diffusion_config", "engram_config", "speculative_config", "weight_transfer_config")
    )
    for name, value in changes.items():
        section, _, key = name.partition("__")
        (sections[section] if key else whole).update({key or name: value})
    configs = {f"{name}_config": SimpleNamespace(**each) for name, each in sections.items()}
    return SimpleNamespace(**(configs | whole))


def caches_of(*specs: Any) -> Any:
    """vLLM's configuration of KV caches, with a group for each kind."""
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    return SimpleNamespace(kv_cache_groups=groups, hash_block_size=None)


def refused(caches: Any, **changes: Any) -> list[str]:
    """Names of all that a server of these settings is refused for."""
    return [each.what for each in refusals(read_setup(config_of(**changes), caches))]


@pytest.mark.parametrize("spec", [FULL, MLA, UniformTypeKVCacheSpecs(16, {"a": FULL, "b": FULL})])
def test_plain_attention_is_read_as_such(spec: Any) -> None:
    """One group of plain layers, of one shape or several, is not refused."""
    assert refused(caches_of(spec)) == []


WINDOW = SlidingWindowSpec(**_SHAPE, dtype=torch.bfloat16, sliding_window=64)
LOCAL = ChunkedLocalAttentionSpec(**_SHAPE, dtype=torch.bfloat16, attention_chunk_size=64)
SPECIAL = {
    "window": (WINDOW, "attention that is not plain and causal: sliding window"),
    "local": (LOCAL, "attention that is not plain and causal: chunked local attention"),
    "both ways": (
        replace(FULL, non_causal=True),
        "attention that is not plain and causal: non-causal attention",
    ),
    "index": (
        replace(MLA, cache_role=SparseCacheRole.INDEXER),
        "sparse attention with an index key (DSA)",
    ),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_other_kinds_of_kv_are_refused_by_name(name: str) -> None:
    """A group of another kind is named."""
    spec, reason = SPECIAL[name]
    assert refused(caches_of(spec)) == [reason]


def test_a_full_layer_with_a_window_that_keeps_all_rows_is_plain() -> None:
    """Without the hybrid KV cache manager a window only masks, so rows of all tokens are there."""
    assert refused(caches_of(replace(FULL, sliding_window=64))) == []


def test_groups_are_counted() -> None:
    """A full group beside one with a window is refused by both names."""
    assert refused(caches_of(FULL, WINDOW)) == [
        "attention that is not plain and causal: sliding window",
        "2 groups of KV caches",
    ]


READ: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"cache__cache_dtype": "fp8_e4m3"}, "KV dtype fp8_e4m3"),
    "model dtype": ({"model__dtype": torch.float64}, "KV dtype float64"),
    "hashes": ({"cache__hash_block_size": 8}, "hashes of 8 tokens in blocks of 16"),
    "index": (
        {"model__hf_text_config": SimpleNamespace(index_topk=2048)},
        "sparse attention with an index key (DSA)",
    ),
    "draft": (
        {"speculative_config": SimpleNamespace(method="ngram")},
        "speculative decoding (ngram)",
    ),
    "decode": ({"parallel__decode_context_parallel_size": 2}, "context parallelism"),
    "pooling": ({"model__runner_type": "pooling"}, "no generating model"),
    "offload": ({"cache__kv_offloading_size": 4.0}, "KV offloading"),
    "connector": (
        {"kv_transfer_config": None},
        "the KV connector none",
    ),
    "role": ({"kv_transfer__kv_role": "kv_consumer"}, "the KV connector's role kv_consumer"),
    "scheduler": ({"scheduler__scheduler_cls": ArgumentParser}, "the scheduler argparse"),
    "weights": (
        {"weight_transfer_config": SimpleNamespace()},
        "weights that may be replaced under their KV",
    ),
}


@pytest.mark.parametrize("name", READ)
def test_settings_are_read_from_where_vllm_keeps_them(name: str) -> None:
    """A setting of vLLM's configuration is refused, and nothing else is."""
    changes, reason = READ[name]
    (found,) = refused(caches_of(FULL), **changes)
    assert found.startswith(reason)


@pytest.mark.parametrize("scheduler", [Scheduler, "leyline_engine.vllm.scheduler.Scheduler"])
def test_these_schedulers_are_not_refused(scheduler: Any) -> None:
    """The schedulers of vLLM and of Leyline pass, by class or by name."""
    assert refused(caches_of(FULL), scheduler__scheduler_cls=scheduler) == []
