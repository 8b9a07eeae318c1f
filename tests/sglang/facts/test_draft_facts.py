"""The facts of speculative decoding: which algorithms splice, and where their drafts keep KV."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.runtime_context import get_context
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from test_facts import Layers, context_of, facts_by_modules, gqa_pool

from leyline_engine.sglang import plugin
from leyline_engine.sglang.facts.allow_list import SPECULATIVE, Setup, refusals
from leyline_engine.sglang.facts.drafts import corpus_emptier
from leyline_engine.sglang.facts.setup import EngineFacts


class Drafting:
    """A scheduler with a draft model, as far as facts are read from it.

    Args:
        model: the draft's; two layers by default.
        slots: of the draft's pool.
        dtype: of the draft's pool.
        shared: whether it uses the target's slots.
    """

    def __init__(
        self,
        folder: Path,
        model: Any = None,
        *,
        slots: int = 32,
        shared: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.context = context_of(Layers(), gqa_pool(), folder)
        target = self.context.tp_worker.model_runner
        target.req_to_token_pool = object()
        target.token_to_kv_pool_allocator = self.context.params.token_to_kv_pool_allocator
        pool = MHATokenToKVPool(slots, 1, dtype, 2, 64, 2, "cpu", False)
        runner = SimpleNamespace(
            model=model or Layers("llama3"),
            token_to_kv_pool=pool,
            req_to_token_pool=target.req_to_token_pool,
            token_to_kv_pool_allocator=target.token_to_kv_pool_allocator if shared else object(),
        )
        self.draft_worker = SimpleNamespace(_draft_model_runners=lambda: (runner,))
        self.tp_worker = self.context.tp_worker
        plugin._drafted(lambda _: None, self)

    def facts(self, **settings: Any) -> EngineFacts:
        """Read the facts under EAGLE, or other settings."""
        with get_context().override_server_args(**({"speculative_algorithm": "EAGLE"} | settings)):
            return facts_by_modules(self.context)


def test_every_algorithm_of_sglang_is_judged() -> None:
    """The table has a row for each that SGLang has; others are refused as unknown."""
    known = {algorithm.name for algorithm in SpeculativeAlgorithm} - {"NONE"}
    assert known == set(SPECULATIVE) - {""}
    for name, why in SPECULATIVE.items():
        refused = refusals(Setup(speculative=name))
        assert bool(refused) == bool(why)
        assert all(why in each.what for each in refused)
    (unknown,) = refusals(Setup(speculative="OURS"))
    assert "unknown" in unknown.what


def test_a_draft_model_is_measured_by_itself(tmp_path: Path) -> None:
    """Its rotary embedding is its own, its rows are spliced with the model's, and it is named."""
    facts = Drafting(tmp_path).facts()
    assert facts.capability.splices, facts.capability.unsupported_reason
    assert (facts.capability.speculative, facts.capability.draft_layers) == ("EAGLE", 2)
    assert facts.pool is not None
    (draft,) = facts.pool.drafts
    assert not torch.equal(draft.rotary.inv_freq, facts.pool.rotary.inv_freq)
    assert draft.tensors.keys[0] is not facts.pool.tensors.keys[0]


def odd() -> Layers:
    model = Layers()
    model.layers[0].attn.is_cross_attention = True
    return model


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"slots": 16}, "the draft model: KV in 17 slots, the model's in 33"),
        ({"dtype": torch.float8_e5m2}, "the draft model: KV dtype float8_e5m2"),
        ({"shared": False}, "the draft model: KV in slots of its own"),
        ({"model": odd()}, "the draft model: cross attention"),
        (
            {"model": Layers("default", "llama3")},
            "the draft model: the layers' rotary embeddings differ",
        ),
    ],
)
def test_a_draft_that_cannot_be_spliced_is_refused_by_name(
    options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """Rows in other slots, or keys that nothing explains, splice nothing at all."""
    facts = Drafting(tmp_path, **options).facts()
    assert facts.pool is None
    assert facts.capability.unsupported_reason == reason
    assert facts.capability.speculative == ""


@pytest.mark.parametrize(
    "name", ["speculative_accept_threshold_single", "speculative_accept_threshold_acc"]
)
def test_drafts_that_change_answers_are_refused(name: str, tmp_path: Path) -> None:
    """Below 1, SGLang accepts drafts that the model would not have chosen."""
    facts = Drafting(tmp_path).facts(**{name: 0.9})
    assert "--speculative-accept-threshold-single" in facts.capability.unsupported_fix
    with get_context().override_server_args(**{name: 0.9}):
        assert facts_by_modules(Drafting(tmp_path).context).capability.splices


def test_a_worker_without_a_draft_model_is_refused(tmp_path: Path) -> None:
    """A draft that reads the model's own KV isn't spliced."""
    drafting = Drafting(tmp_path)
    drafting.draft_worker._draft_model_runners = lambda: ()
    reason = drafting.facts().capability.unsupported_reason
    assert reason == "EAGLE without a draft model of its own"


def test_a_corpus_is_emptied_once_all_of_it_is_there(tmp_path: Path) -> None:
    """Tokens that wait to be inserted are waited for; without a corpus there is nothing to do."""
    drafting = Drafting(tmp_path)
    assert corpus_emptier(drafting.tp_worker) is None
    done: list[str] = []
    drafting.draft_worker.ngram_corpus = SimpleNamespace(
        synchronize=lambda: done.append("inserted")
    )
    drafting.draft_worker.clear_cache_pool = lambda: done.append("emptied")
    empty = corpus_emptier(drafting.tp_worker)
    assert empty is not None
    empty()
    assert done == ["inserted", "emptied"]
    facts = drafting.facts(speculative_algorithm="NGRAM")
    assert facts.capability.splices and facts.pool is not None
    assert facts.pool.drafts == ()
