"""vLLM's scheduler with Leyline's hooks: the places that a connector's interface doesn't reach.

The hooks sit on whichever class vLLM has chosen, :class:`Scheduler` or :class:`AsyncScheduler`, as
overridden methods; vLLM's own code runs in all of them.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

from leyline_engine.scheduler.containment import contained
from leyline_engine.vllm.engine import SchedulerEngine


class SchedulerHooks:
    """Overrides of vLLM's scheduler; the connector knows the engine."""

    connector: Any
    running: list[Any]
    requests: dict[str, Any]
    prev_step_scheduled_req_ids: set[str]
    kv_cache_manager: Any
    finish_requests: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refused: list[tuple[Any, str]] = []
        """Requests that claims have ended since the last step, with the reason."""
        if hasattr(self.connector, "leyline"):
            self.connector.open(self)

    @property
    def _leyline(self) -> SchedulerEngine | None:
        engine: SchedulerEngine | None = getattr(self.connector, "leyline", None)
        return engine

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Choose the next step's tokens; staged turns continue after the rows that follow."""
        engine = self._leyline
        if engine is not None:
            running = set(self.running)
            waiting = (each for each in tuple(self.requests.values()) if each not in running)
            for request, reason in engine.refuser.waiting(waiting):
                self._refuse(request, reason)
            engine.stepping(self.running, self.requests.values())
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def add_request(self, request: Any) -> None:
        """Queue a request, unless it can't run before a claim ends."""
        is_new = request.request_id not in self.requests
        super().add_request(request)  # type: ignore[misc]
        engine = self._leyline
        reason = engine.refuser.refused(request) if engine is not None and is_new else ""
        if reason:
            self._refuse(request, reason)

    def _refuse(self, request: Any, reason: str) -> None:
        from vllm.v1.request import RequestStatus

        with contained("refusing a request"):
            self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
            self._refused.append((request, reason))

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of a step, and the ends of requests that were refused."""
        outputs = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        refused, self._refused = self._refused, []
        for request, reason in refused:
            with contained("answering a refused request"):
                _add_refusal(outputs, request, reason)
        return outputs

    def _get_local_prefix_cache_hit(self, request: Any) -> Any:
        """Look a waiting request's prompt up under its lineage map, as far as that may serve it."""
        engine = self._leyline
        allowed = engine.look_up(request) if engine is not None else None
        original = super()._get_local_prefix_cache_hit  # type: ignore[misc]
        if allowed is None:
            return original(request)
        hashes, request.block_hashes = request.block_hashes, request.block_hashes[:allowed]
        try:
            return original(request)
        finally:
            request.block_hashes = hashes

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, *args: Any) -> int:
        """Return the size of a chunk: it ends where rows are copied next."""
        original = super()._reserve_prefill_lookahead  # type: ignore[misc]
        tokens: int = original(request, num_computed_tokens, *args)
        engine = self._leyline
        return tokens if engine is None else engine.capped(request, num_computed_tokens, tokens)

    def _build_kv_connector_meta(self, connector: Any, scheduler_output: Any) -> Any:
        """Return the workers' orders; a step that has any carries them out before its forward."""
        meta = super()._build_kv_connector_meta(connector, scheduler_output)  # type: ignore[misc]
        if self._leyline is not None and meta.orders:
            scheduler_output.has_sync_kv_loads = True
        return meta

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """Take a running request's blocks."""
        engine = self._leyline
        if engine is not None:
            engine.preempting(request)
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def _handle_invalid_blocks(self, invalid_block_ids: set[int], *args: Any) -> set[str]:
        """Have requests computed again whose rows could not be copied, from their start on.

        vLLM itself would go on from the first such block, and let others find it meanwhile.
        """
        original = super()._handle_invalid_blocks  # type: ignore[misc]
        failed: set[str] = original(invalid_block_ids, *args)
        engine = self._leyline
        if engine is None:
            return failed
        engine.failed()
        for request in [each for each in self.running if each.request_id in failed]:
            self.running.remove(request)
            engine.spoilt(request)
            self._preempt_request(request, time.monotonic(), drop_stale_output=True)
            self.prev_step_scheduled_req_ids.discard(request.request_id)
        return failed

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, *args: Any, **kwargs: Any
    ) -> bool:
        """Empty the prefix cache, and with it all that turns could draw on.

        If requests have blocks and may keep them, vLLM empties nothing, and claims stay.
        """
        engine = self._leyline
        if engine is not None and (reset_running_requests or not self.requests):
            engine.claims.flushing()
        original = super().reset_prefix_cache  # type: ignore[misc]
        done: bool = original(reset_running_requests, *args, **kwargs)
        if done and engine is not None:
            engine.flushed()
        return done


def _add_refusal(outputs: dict[int, Any], request: Any, reason: str) -> None:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    ending = EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=request.get_finished_reason(),
        stop_reason=reason,
        events=request.take_events(),
        trace_headers=request.trace_headers,
    )
    mine = outputs.get(request.client_index)
    if mine is None:
        mine = outputs[request.client_index] = EngineCoreOutputs()
    mine.outputs = [*mine.outputs, ending]


@cache
def hooked(scheduler: type) -> type:
    """Return a scheduler class of vLLM's with Leyline's hooks."""
    return type(f"Leyline{scheduler.__name__}", (SchedulerHooks, scheduler), {})
