"""vLLM's scheduler with Leyline's hooks: the places that a connector's interface doesn't reach.

The hooks sit on whichever class vLLM has chosen, :class:`Scheduler` or :class:`AsyncScheduler`, as
overridden methods; vLLM's own code runs in all of them.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

from leyline_engine.vllm.engine import SchedulerEngine


class SchedulerHooks:
    """Overrides of vLLM's scheduler; the connector knows the engine."""

    connector: Any
    running: list[Any]
    requests: dict[str, Any]
    prev_step_scheduled_req_ids: set[str]
    kv_cache_manager: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
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
            engine.stepping(self.running, self.requests.values())
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

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

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Empty the prefix cache, and with it all that turns could draw on."""
        done: bool = super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]
        engine = self._leyline
        if done and engine is not None:
            engine.flushed()
        return done


@cache
def hooked(scheduler: type) -> type:
    """Return a scheduler class of vLLM's with Leyline's hooks."""
    return type(f"Leyline{scheduler.__name__}", (SchedulerHooks, scheduler), {})
