"""The litmus suite's runtime on the real SGLang, in this process, one step at a time.

It has SGLang's own scheduler, model, tree and pool. One scheduler serves all cases. Each begins
with an empty tree, a book of its own, and a pool reduced to the case's number of slots.
"""

from __future__ import annotations

import dataclasses
import os
from array import array
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec

from leyline_engine.claims.events import AnyEvent, EventLedger, Run
from leyline_engine.contract import ClaimRefusal, EditPayload, edit_envelope
from leyline_lab.claims.desk_runtime import DeskRuntime
from leyline_lab.claims.litmus import LIMITS, Runtime, unit_of
from leyline_lab.claims.micro import Request

_POOL_PAGES = 200
_CHUNK_PAGES = 32
_FLAGS = (
    "--max-running-requests=4",
    "--dtype=float32",
    "--radix-cache-backend=leyline",
    "--disable-overlap-schedule",
    "--skip-server-warmup",
    "--device=cpu",
)
_STEPS = 500
"""Maximum number of steps; no request of the suite takes as many."""


def open_sglang(usable: int, sink: Callable[[AnyEvent], None], page: int = 1) -> Runtime:
    """Open SGLang with a pool of ``usable`` pages.

    Args:
        page: its ``--page-size``, the same throughout a process.
    """
    return SglangRuntime(_scheduler(page), usable, sink)


@cache
def _scheduler(page: int) -> Any:
    """Return SGLang's scheduler with the model that ships, in this process."""
    from leyline_lab.sglang_cpu.activation import activate
    from leyline_replay.models.trained import DEFAULT_MODEL_NAME, trained_model_dir

    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    activate()
    from sglang.srt.managers import scheduler as module
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import PortArgs, prepare_server_args

    load_plugins()
    unit, model = unit_of(page), str(trained_model_dir(DEFAULT_MODEL_NAME))
    sizes = (
        f"--page-size={page}",
        f"--max-total-tokens={_POOL_PAGES * unit}",
        f"--chunked-prefill-size={_CHUNK_PAGES * unit}",
    )
    args = prepare_server_args(["--model-path", model, *sizes, *_FLAGS])
    ranks = module.SpawnRanks(
        world_rank=module.spawn_world_rank(args, tp_rank=0, pp_rank=0), dp_rank=None, gpu_id=0
    )
    module.publish(args, role="scheduler", ranks=ranks)
    module.configure_scheduler_process(args, 0)
    return module.Scheduler(args, PortArgs.init_new(args))


class _Outbox:
    """Takes the scheduler's messages to other processes, of which there are none."""

    def send_output(self, *_: Any) -> None:
        """Do nothing: there is no listener."""


class SglangRuntime(DeskRuntime):
    """SGLang as a :class:`leyline_lab.claims.litmus.Runtime`.

    Args:
        scheduler: SGLang's, idle.
        usable: pages that the case may use.
        sink: takes the events.
    """

    def __init__(self, scheduler: Any, usable: int, sink: Callable[[AnyEvent], None]) -> None:
        from leyline_engine.sglang.claim_desk import SchedulerClaims
        from leyline_lab.claims.sglang_watch import Watch

        self._scheduler = scheduler
        self._engine = scheduler.tree_cache.leyline
        page = int(scheduler.tree_cache.page_size)
        unit = unit_of(page)
        self._empty(usable * unit)
        desk = SchedulerClaims(
            scheduler.tree_cache,
            self._engine.registry,
            usable=usable * unit,
            page_size=page,
            limits=LIMITS,
            ledger=EventLedger(sink=sink),
            watched=True,
        )
        super().__init__(desk.keeper, self._engine.registry, unit)
        self._engine.claims = desk
        scheduler.tree_cache.shelf = desk.shelf
        self._watch = Watch(scheduler.tree_cache, desk.keeper, desk.shelf)
        self._refused: ClaimRefusal | None = None
        self._engine.refuse = self._refuse

    def _empty(self, usable: int) -> None:
        """Empty the tree, and leave the case no more of the pool than it may have."""
        scheduler = self._scheduler
        outbox = _Outbox()
        scheduler.ipc_channels = dataclasses.replace(
            scheduler.ipc_channels, send_to_tokenizer=outbox, send_to_detokenizer=outbox
        )
        scheduler.output_streamer.send_to_detokenizer = outbox
        scheduler.flush_cache()
        allocator = scheduler.token_to_kv_pool_allocator
        taken = int(allocator.available_size()) - usable
        if taken < 0:
            raise ValueError(f"the suite's pool has no {usable} slots")
        if taken:
            allocator.alloc(taken)

    def run(
        self, request: Request, prompt: array[int], payload: EditPayload, max_new_tokens: int
    ) -> ClaimRefusal | None:
        """Run a prompt; see :meth:`.DeskRuntime.run`."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        envelope = edit_envelope(request.name, payload)
        custom = {"kv_hints": msgspec.json.encode(envelope).decode()}
        parameters = SamplingParams(
            max_new_tokens=max_new_tokens, temperature=0, ignore_eos=True, custom_params=custom
        )
        parameters.normalize(None)
        message = TokenizedGenerateReqInput(
            rid=request.name,
            input_text="",
            input_ids=prompt,
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=parameters,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
        )
        self._refused = None
        self._scheduler.process_input_requests([message])
        waiting = self._scheduler.waiting_queue
        if not waiting:
            return self._refused
        (req,) = waiting
        if request.write_no_admit:
            req.leyline.private = req.skip_radix_cache_insert = True
        self._watch.begins(req, self._engine.cached_slots(req))
        self._drain()
        return None

    def _refuse(self, req: Any, *, began: bool = False) -> ClaimRefusal | None:
        self._refused = type(self._engine).refuse(self._engine, req, began=began)
        return self._refused

    def _drain(self) -> None:
        scheduler = self._scheduler
        for _ in range(_STEPS):
            plan = scheduler.get_next_batch_to_run(
                running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
            )
            scheduler.running_batch = plan.running_batch
            batch = plan.batch_to_run
            scheduler.cur_batch_for_debug = batch
            if batch:
                scheduler.process_batch_result(batch, scheduler.run_batch(batch))
            scheduler.last_batch = batch
            if not (batch or scheduler.waiting_queue or not scheduler.running_batch.is_empty()):
                return
        raise RuntimeError("a request of the suite doesn't end")

    def lose(self, run: Run, cause: str) -> None:
        """Remove a path from the run's start on, as a forget does."""
        from leyline_engine.records.publications import Publication

        source = self.source(run.source)
        self._scheduler.tree_cache.unpublish(
            Publication(source.keys(), source.lineage), run.start * self.unit, cause
        )
        self._watch.caught_up()
