"""The facts of a worker whose model has MLA."""

from __future__ import annotations

from pathlib import Path

import torch
from vllm_engine import engine, layers_of, runner_of

from leyline_engine.rotary.tables import rotary_modules
from leyline_engine.vllm.facts.layouts import flat_storage
from leyline_engine.vllm.facts.setup import read_setup
from leyline_engine.vllm.facts.worker_facts import read_worker_facts
from leyline_lab.stand_ins.random_models import RandomKind, build_model, build_random, random_config

WIDTHS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
"""Those of DeepSeek's models: vLLM's back ends take no others."""


def model_folder(folder: Path) -> Path:
    """A tiny DeepSeek-V2 under YaRN scaling whose latent has the usual width."""
    build_random(RandomKind.LLAMA, folder)
    config = random_config(RandomKind.MLA_YARN)
    for name, width in WIDTHS.items():
        setattr(config, name, width)
    build_model(config).save_pretrained(folder)
    return folder


def test_an_mla_worker_knows_the_band_that_turns(tmp_path: Path) -> None:
    """The row's last 64 dimensions turn in pairs by the module's own frequencies."""
    folder = model_folder(tmp_path / "mla")
    with engine(folder, dtype="bfloat16", block_size=None, max_model_len=512) as llm:
        runner = runner_of(llm)
        layers = layers_of(runner)
        facts = read_worker_facts(runner, {name: each.kv_cache for name, each in layers.items()})
        assert facts.refusal == ""
        # vLLM chooses it by the processor.
        block = runner.vllm_config.cache_config.block_size
        assert block in {16, 128} and (facts.block_size, facts.start) == (block, 512)
        assert facts.rotary is not None
        assert facts.rotary.pairing == "interleaved"
        (module, *_) = rotary_modules(runner.get_model())
        own = module._compute_inv_freq(module.scaling_factor)
        assert torch.equal(facts.rotary.frequencies[0], own)
        assert facts.kv_facts is not None
        assert facts.kv_facts.pool_class == "mla_latent"
        assert facts.layouts is not None
        for name, layer in layers.items():
            assert not layer.kv_cache.any()
            layer.kv_cache.normal_()
            keys, values = facts.layouts[name].rows(flat_storage(layer.kv_cache))
            assert values is None
            assert torch.equal(keys[:, :, 0], layer.kv_cache)
        assert read_setup(runner.vllm_config, runner.kv_cache_config).mla_on_cpu
