"""Entry point ``leyline`` of ``sglang.srt.plugins``: runs in every SGLang process.

A SGLang of a version that wasn't tested is left as it is: the back end's name stands for its own
radix cache there, so that it serves without splicing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from leyline_engine.contract import SGLANG, engine_versions, is_tested
from leyline_engine.settings import MATCHER_VARIABLE, copy_limits, recompute_from

BACKEND = "leyline"
"""Value of ``--radix-cache-backend`` that switches Leyline on."""

log = logging.getLogger(__name__)


def register() -> None:
    """Extend this SGLang process: the radix back end, the scheduler's hooks, the HTTP routes."""
    from sglang.srt.mem_cache.registry import (
        get_radix_cache_factory,
        register_radix_cache_backend,
    )
    from sglang.version import __version__

    if get_radix_cache_factory(BACKEND) is not None:
        return
    if not is_tested(SGLANG, __version__):
        _leave_as_it_is(__version__)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from leyline_engine.sglang.server.http import register_http

    register_radix_cache_backend(BACKEND, create_cache)
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    streamer = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
    for target, hook in {
        f"{scheduler}._create_generation_req": _receive,
        f"{scheduler}.get_prefill_adder_class": _adder_class,
        f"{scheduler}.maybe_init_draft_worker": _drafted,
        f"{scheduler}._add_request_to_queue": _queue,
        f"{scheduler}.get_next_batch_to_run": _next_batch,
        f"{scheduler}.handle_dumper_control": _control,
        f"{scheduler}.process_batch_result": _process_result,
        "sglang.srt.managers.tp_worker.capture_pre_sample_logits": _capture_logits,
        "sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode": _retract,
        f"{streamer}.stream_output": _stream_output,
        "sglang.srt.managers.schedule_policy.touch_waiting_prefix": _touch,
    }.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    register_http()


def _leave_as_it_is(version: str) -> None:
    """Have an untested SGLang serve with its own cache under the back end's name, unhooked."""
    from sglang.srt.mem_cache.registry import (
        default_radix_cache_factory,
        register_radix_cache_backend,
    )

    log.error(
        "Leyline is tested with SGLang %s, not with %s: this server doesn't splice",
        " and ".join(engine_versions(SGLANG)),
        version,
    )
    register_radix_cache_backend(BACKEND, default_radix_cache_factory)


def create_cache(context: Any) -> Any:
    """Create the tree cache of one scheduler (``--radix-cache-backend leyline``)."""
    from sglang.srt.mem_cache.registry import create_unified_radix_cache
    from sglang.srt.runtime_context import get_observability, get_parallel

    from leyline_engine.admit.packed_hints import hints_secret
    from leyline_engine.energy import cuda_uuids, open_account
    from leyline_engine.reuse.fingerprints import MatcherKind, read_matcher
    from leyline_engine.server.channel import open_sender
    from leyline_engine.server.claim_desk import limits_from
    from leyline_engine.sglang.engine import SchedulerEngine
    from leyline_engine.sglang.host_tree import tree_class
    from leyline_engine.sglang.metrics import open_metrics
    from leyline_engine.sglang.ranks import replica_of
    from leyline_engine.sglang.tensor_parallel import agreement, common_counts, common_salt

    cache = create_unified_radix_cache(context, cache_class=tree_class(context))
    group = context.params.attn_tp_cache_group or context.params.tp_cache_group
    agree = agreement(group)
    facts = _facts(context, cache, group).agreed(agree)
    parallel = get_parallel()
    replica = replica_of(parallel)
    metrics = open_metrics(
        enabled=get_observability().enable_metrics, attn_tp_rank=parallel.attn_tp_rank
    )
    sender = open_sender(
        attn_tp_rank=parallel.attn_tp_rank,
        dp_rank=replica.rank,
        on_drop=metrics.receipt_dropped,
    )
    min_copy, stage_cost = common_counts(group, copy_limits())
    SchedulerEngine(
        cache,
        facts.pool,
        facts.capability,
        sender,
        metrics,
        secret=hints_secret(),
        salt=common_salt(group),
        min_copy=min_copy,
        stage_cost=stage_cost,
        recompute=recompute_from(facts.capability),
        matcher=read_matcher(os.environ.get(MATCHER_VARIABLE) or MatcherKind.WINNOW),
        agree=agree,
        limits=limits_from(),
        energy=open_account(
            metrics, lambda: cuda_uuids(_gpus(context, int(parallel.attn_tp_size)))
        ),
        replica=replica,
    )
    if facts.capability.splices:
        log.info("Leyline splices the KV cache of this scheduler")
    else:
        log.warning("Leyline does not splice here: %s", facts.capability.unsupported_reason)
    return cache


def _facts(context: Any, cache: Any, group: Any) -> Any:
    """Return the facts of this rank's model and pool, and note in the cache what drafts for it."""
    from sglang.srt.runtime_context import get_spec

    from leyline_engine.rows.origins import origin_bytes_from
    from leyline_engine.sglang.facts.drafts import corpus_emptier
    from leyline_engine.sglang.facts.setup import read_facts
    from leyline_engine.sglang.tensor_parallel import common_rows

    facts = read_facts(context, cache, origin_bytes=origin_bytes_from(), common=common_rows(group))
    cache.speculative = str(get_spec().speculative_algorithm or "")
    cache.empty_corpus = corpus_emptier(context.tp_worker)
    return facts


def _gpus(context: Any, ranks: int) -> range:
    """Return the GPUs of this scheduler's attention-TP ranks on this machine, by torch's numbers.

    With data-parallel attention those are fewer than the TP ranks, and each counts with its own.
    """
    first, step = int(context.tp_worker.gpu_id), int(context.server_args.gpu_id_step)
    return range(first, first + ranks * step, step)


def _engine(scheduler: Any) -> Any:
    return getattr(scheduler.tree_cache, "leyline", None)


def _receive(
    original: Callable[..., Any], self: Any, received: Any, *args: Any, **kwargs: Any
) -> Any:
    """Read a new request's envelope."""
    req = original(self, received, *args, **kwargs)
    engine = _engine(self)
    if engine is not None:
        from leyline_engine.sglang.hints import beside_tokens

        engine.receive(req, beside=beside_tokens(received))
    return req


def _adder_class(original: Callable[..., Any], self: Any) -> Any:
    """Admit with :class:`.adder.LeylinePrefillAdder`."""
    if _engine(self) is None:
        return original(self)
    from leyline_engine.sglang.adder import LeylinePrefillAdder

    return LeylinePrefillAdder


def _drafted(original: Callable[..., Any], self: Any) -> None:
    """Note the draft worker, whose KV is spliced with the target's."""
    from leyline_engine.sglang.facts.drafts import note_worker

    original(self)
    note_worker(self)


def _queue(original: Callable[..., Any], self: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse a request that can't run beside claims.

    An engine's own row that was retracted is dropped: its turn sends another.
    """
    from leyline_engine.sglang.refusing import refuse_request
    from leyline_engine.sglang.stage_row import StageRow

    if isinstance(req, StageRow):
        return None
    engine = _engine(self)
    if engine is not None and refuse_request(self, engine, req):
        return None
    return original(self, req, *args, **kwargs)


def _next_batch(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse requests that can't run, or continue, since claims came."""
    from leyline_engine.sglang.stage_row import note_launched

    engine = _engine(self)
    if engine is not None:
        engine.chores.step()
    if engine is not None and engine.claims.keeper:
        from leyline_engine.sglang.refusing import refuse_chunked, refuse_waiting

        refuse_chunked(self, engine)
        if engine.claims.recheck:
            refuse_waiting(self, engine)
    plan = original(self, *args, **kwargs)
    if engine is not None:
        if plan.batch_to_run is not None:
            note_launched(plan.batch_to_run)
        engine.forgets.stepped()
        engine.readings.stepped(plan.batch_to_run)
    return plan


def _control(original: Callable[..., Any], self: Any, message: Any) -> Any:
    """Carry out a message about claims, or answer a question about the ledger.

    It uses SGLang's one message that takes any JSON, and comes to all ranks between the same
    requests.
    """
    from leyline_engine.sglang.server.http import CLAIMS_METHOD

    engine = _engine(self)
    if engine is None or message.method != CLAIMS_METHOD:
        return original(self, message)
    from leyline_engine.sglang.refusing import answer_control

    return answer_control(self, engine, message)


def _retract(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Report requests that end because claims leave their output no room."""
    retracted, ratio, aborted = original(self, *args, **kwargs)
    engine = getattr(self.tree_cache, "leyline", None)
    if engine is not None and aborted:
        from leyline_engine.sglang.refusing import name_outgrown

        name_outgrown(engine, aborted)
    return retracted, ratio, aborted


def _capture_logits(
    original: Callable[..., Any], batch: Any, forward_batch: Any, output: Any
) -> Any:
    """Note the margins of turns that reuse, as sampling overwrites the logits."""
    captured = original(batch, forward_batch, output)
    if output is not None:
        from leyline_engine.scheduler.containment import contained
        from leyline_engine.sglang.margin_gate import note_margins

        with contained("noting margins"):
            note_margins(batch, output.next_token_logits)
    return captured


def _process_result(original: Callable[..., Any], self: Any, batch: Any, result: Any) -> Any:
    """Judge the prefills that a batch ends, before their KV is published."""
    engine = _engine(self)
    if engine is not None:
        engine.prefilled(batch)
    return original(self, batch, result)


def _stream_output(
    original: Callable[..., Any], self: Any, reqs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Keep the engine's own prefill rows from the detokeniser: no client asked for them."""
    from leyline_engine.sglang.stage_row import StageRow

    return original(self, [r for r in reqs if not isinstance(r, StageRow)], *args, **kwargs)


def _touch(original: Callable[..., Any], req: Any, tree_cache: Any) -> Any:
    """Refresh a waiting request's prefix under its own keys."""
    turn = getattr(req, "leyline", None)
    if turn is None or not turn.lineage:
        return original(req, tree_cache)
    return tree_cache.touch_turn(turn)
