"""Long random use of a vLLM engine leaks nothing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from soak_kit import soak
from splice_kit import SplicingEngine, splicing_engine

BLOCKS = 256
"""Of the pool: too few for all sessions, so blocks are evicted."""


def leaks(engine: SplicingEngine) -> dict[str, object]:
    """All that an idle engine should have let go of, and hasn't."""
    leyline, pool = engine.leyline, engine.scheduler.kv_cache_manager.block_pool
    registry = leyline.registry
    turns = {
        ((source.scope, source.session), source.turn)
        for session in list(registry._sessions)
        for source in registry.turns(session)
    }
    pending = leyline.cache.pending
    found = {
        "blocks in use": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "held": [block.block_id for block in pool.blocks[1:] if block.ref_cnt],
        "turns": list(leyline.turns),
        "doomed": leyline.cache._doomed,
        "due": leyline.cache._due,
        "withheld": leyline._withholder._firsts,
        "tickets": pending._counts.keys() | pending._waiting.keys() | pending._owners.keys(),
        "keys of turns that are gone": leyline._keys._plain.keys() - turns,
        "copies to come": leyline._stepper._orders or leyline._stepper._finished,
        "too many paths": leyline.publications.tokens > leyline.publications._max_tokens,
    }
    return {name: what for name, what in found.items() if what}


def check(engine: SplicingEngine, tally: Counter[str], sessions: int) -> None:
    """Nothing is left of requests; what is kept of sessions is within its bounds, and can go."""
    assert not leaks(engine)
    leyline = engine.leyline
    assert leyline.registry.count() <= 8 * sessions
    assert leyline.ledger.lineage_count() <= 4096
    assert tally["spliced"] > 0.1 * tally["turns"]
    assert len(leyline.cache._stale) < BLOCKS
    for kind in ("edits", "forgets", "forgot", "retires", "aborts", "branches", "strangers"):
        assert tally[kind], f"nothing was tried of {kind}"
    assert engine.scheduler.reset_prefix_cache()
    assert not leaks(engine)
    assert not leyline.registry.count() and not leyline._keys._plain
    assert not leyline.publications.tokens


@pytest.mark.nightly
def test_two_thousand_random_turns_leak_nothing(vllm_model: Path) -> None:
    """Sixteen sessions of two tenants on a pool that holds a few."""
    with splicing_engine(vllm_model, num_gpu_blocks_override=BLOCKS, max_model_len=2048) as engine:
        check(engine, soak(engine, sessions=16, turns=2000, seed=1), 16)
