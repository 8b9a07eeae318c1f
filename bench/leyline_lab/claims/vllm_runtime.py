"""The litmus suite's runtime on the real vLLM, in this process, one step at a time.

It has vLLM's own engine core, scheduler, block pool and model runner. One core serves all cases,
with a model of random weights. Each case begins with a new scheduler, so with an empty cache and a
book of its own, over as many of the core's blocks as the case has.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from array import array
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec

from leyline_engine.claims.events import AnyEvent, EventLedger, Run
from leyline_engine.contract import ClaimRefusal, EditPayload, edit_envelope
from leyline_lab.claims.desk_runtime import TENANT, DeskRuntime
from leyline_lab.claims.litmus import Runtime, unit_of
from leyline_lab.claims.micro import Request

_POOL_PAGES = 200
_CHUNK_PAGES = 32
_STEPS = 1000
"""Maximum number of steps; no request of the suite takes as many."""
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": 512,
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 1 << 17,
}
"""A Llama; for the shipped models' kind of attention, vLLM has no prefix caching on a CPU."""


def open_vllm(usable: int, sink: Callable[[AnyEvent], None], page: int = 32) -> Runtime:
    """Open vLLM with a pool of ``usable`` pages.

    Args:
        page: its ``--block-size``, the same throughout a process; on a CPU a multiple of 32.
    """
    return VllmRuntime(engine_core(page), usable, sink)


@cache
def engine_core(page: int) -> Any:
    """Return vLLM's engine core with Leyline in it, in this process."""
    os.environ |= _ENVIRONMENT
    from vllm import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    unit = unit_of(page)
    with tempfile.TemporaryDirectory(prefix="leyline-model-") as folder:
        Path(folder, "config.json").write_text(json.dumps(_MODEL), encoding="utf-8")
        config = EngineArgs(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            enable_prefix_caching=True,
            async_scheduling=False,
            max_num_seqs=4,
            max_model_len=_POOL_PAGES * unit,
            max_num_batched_tokens=_CHUNK_PAGES * unit,
            block_size=page,
            num_gpu_blocks_override=_POOL_PAGES * unit // page + 1,
            kv_transfer_config={"kv_connector": "LeylineConnector", "kv_role": "kv_both"},
        ).create_engine_config()
        return EngineCore(config, Executor.get_class(config), log_stats=False)


class VllmRuntime(DeskRuntime):
    """vLLM as a :class:`leyline_lab.claims.litmus.Runtime`.

    Args:
        core: vLLM's engine core, idle.
        usable: pages that the case may use.
        sink: takes the events.
    """

    def __init__(self, core: Any, usable: int, sink: Callable[[AnyEvent], None]) -> None:
        page = int(core.scheduler.block_size)
        unit = unit_of(page)
        self._core = core
        self._engine = _begin(core, usable * unit // page, EventLedger(sink=sink))
        super().__init__(self._engine.claims.keeper, self._engine.registry, unit)

    def run(
        self, request: Request, prompt: array[int], payload: EditPayload, max_new_tokens: int
    ) -> ClaimRefusal | None:
        """Run a prompt; see :meth:`.DeskRuntime.run`."""
        from vllm import SamplingParams
        from vllm.v1.request import Request as VllmRequest

        from leyline_engine.admit.packed_hints import packed_envelope
        from leyline_engine.vllm.hints import HINTS_ARGUMENT

        envelope = msgspec.to_builtins(edit_envelope(request.name, payload))
        parameters = SamplingParams(
            temperature=0,
            max_tokens=max_new_tokens,
            ignore_eos=True,
            extra_args={HINTS_ARGUMENT: packed_envelope(envelope)},
        )
        claims = self._engine.claims
        claims.private = request.write_no_admit
        hasher = self._core.request_block_hasher
        self._core.add_request(
            VllmRequest(request.name, list(prompt), parameters, None, block_hasher=hasher)
        )
        self._settle()
        refusal: ClaimRefusal | None = claims.refusal
        return refusal

    def _settle(self) -> None:
        """Step until nothing is to be done, and the workers know of it."""
        for _ in range(_STEPS):
            if not self._core.scheduler.has_requests():
                return
            self._core.step()
        raise RuntimeError("a request of the suite doesn't end")

    def lose(self, run: Run, cause: str) -> None:
        """Remove a path from the run's start on, as where no forget would find it any more."""
        from leyline_engine.records.publications import Publication

        path = Publication.of_turn(self.source(run.source))
        self._engine._forgetter.remove_all([(TENANT, path, run.start * self.unit)])
        self._settle()


def _begin(core: Any, blocks: int, ledger: EventLedger) -> Any:
    """Give a core a new scheduler with that many blocks; returns Leyline's part of it."""
    from leyline_lab.claims.vllm_watch import WatchedClaims

    old = core.scheduler
    # One more, which vLLM keeps for itself.
    pool = dataclasses.replace(old.kv_cache_config, num_blocks=blocks + 1)
    scheduler = type(old)(
        vllm_config=core.vllm_config,
        kv_cache_config=pool,
        structured_output_manager=core.structured_output_manager,
        block_size=old.block_size,
        hash_block_size=old.hash_block_size,
    )
    old.shutdown()
    core.scheduler = scheduler
    scheduler.connector.open_claims = partial(WatchedClaims, scheduler=scheduler, ledger=ledger)
    (measured,) = core.model_executor.get_kv_connector_handshake_metadata()
    scheduler.connector.set_xfer_handshake_metadata_pp_aware(measured)
    return scheduler.connector.leyline
