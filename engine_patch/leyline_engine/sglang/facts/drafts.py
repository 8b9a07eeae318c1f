"""The draft models' KV pools beside a scheduler's own, and NGRAM's corpus of tokens.

SGLang's target model verifies every draft, so KV of a draft model changes how many tokens are
accepted at once, never which. It is spliced and overwritten like any other KV all the same: what a
session forgot must not be left in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from leyline_engine.rotary.explained_keys import UnsupportedRotaryError
from leyline_engine.rows.pool import SplicePool
from leyline_engine.sglang.rows.layouts import UnsupportedPoolError

_WORKER = "leyline_draft_worker"


class UnsupportedDraftError(Exception):
    """A draft model's KV can't be spliced."""


def note_worker(scheduler: Any) -> None:
    """Note a scheduler's draft worker for :func:`read_drafts`: the tree cache isn't told of it."""
    setattr(scheduler.tp_worker, _WORKER, scheduler.draft_worker)


def read_drafts(
    target_worker: Any, algorithm: str, slots: int, open_pool: Callable[[Any, Any], SplicePool]
) -> tuple[SplicePool, ...]:
    """Return the pools of an algorithm's draft models; none for NGRAM.

    Args:
        target_worker: the target's worker, on which :func:`note_worker` left the draft's.
        algorithm: one that the allow-list has; empty for none.
        slots: rows of the target's pool.
        open_pool: opens the pool of a draft model; takes model and KV pool.

    Raises:
        UnsupportedDraftError: a draft model's KV isn't in the same slots, or can't be measured.
    """
    if algorithm in {"", "NGRAM"}:
        return ()
    worker = getattr(target_worker, _WORKER, None)
    if worker is None:
        raise UnsupportedDraftError(f"{algorithm} without a draft worker in this process")
    runners = worker._draft_model_runners()
    if not runners:
        raise UnsupportedDraftError(f"{algorithm} without a draft model of its own")
    return tuple(_open(runner, target_worker, slots, open_pool) for runner in runners)


def corpus_emptier(target_worker: Any) -> Callable[[], None] | None:
    """Return a function that empties NGRAM's corpus of tokens; None if there is none.

    The corpus is made of what all sessions sent and received. Corpora that an operator loaded stay.
    """
    worker = getattr(target_worker, _WORKER, None)
    corpus = getattr(worker, "ngram_corpus", None)
    if worker is None or corpus is None:
        return None

    def empty() -> None:
        # Tokens that wait to be inserted would come after.
        corpus.synchronize()
        worker.clear_cache_pool()

    return empty


def _open(
    runner: Any, target_worker: Any, slots: int, open_pool: Callable[[Any, Any], SplicePool]
) -> SplicePool:
    target = target_worker.model_runner
    shared = (
        runner.req_to_token_pool is target.req_to_token_pool
        and runner.token_to_kv_pool_allocator is target.token_to_kv_pool_allocator
    )
    if not shared:
        raise UnsupportedDraftError("the draft model: KV in slots of its own")
    try:
        pool = open_pool(runner.model, runner.token_to_kv_pool)
    except (UnsupportedRotaryError, UnsupportedPoolError) as error:
        raise UnsupportedDraftError(f"the draft model: {error}") from error
    if pool.tensors.slots != slots:
        raise UnsupportedDraftError(
            f"the draft model: KV in {pool.tensors.slots} slots, the model's in {slots}"
        )
    return pool
