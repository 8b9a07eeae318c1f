"""SGLang's tree, pools, requests and admission without a model, and a clock over its steps.

A forward only takes slots. Copies of rows cost nothing, as on a GPU, where they are queued: their
mover does nothing, and what the pool's bookkeeping of rows takes isn't counted.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

from leyline_engine.contract import (
    Capability,
    EditPayload,
    ReusePayload,
    TurnRecord,
    edit_envelope,
)
from leyline_engine.metrics import NoMetrics
from leyline_engine.rows.pool import SplicePool
from leyline_engine.sglang.adder import LeylinePrefillAdder
from leyline_engine.sglang.engine import SchedulerEngine
from leyline_engine.sglang.radix import LeylineRadixCache
from leyline_engine.sglang.rows.layouts import read_pool

from .stopwatch import Stopwatch
from .store import ROTARY, Batch, Receipts, Store, rotary_facts

VOCABULARY = 128_000
_ANSWER = 7
"""The token that every forward generates."""
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1 << 18,
}


def prepare_sglang() -> None:
    """Give SGLang's modules the configuration that they read from the process."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_CONFIG))
        get_context().set_server_args(ServerArgs(model_path=folder, device="cpu"))


class _NoMover:
    """Moves nothing."""

    def move(self, move: Any, as_computed: torch.Tensor) -> None:
        """Leave rows as they are."""

    def certify(self, slots: torch.Tensor, origin: torch.Tensor, *_: Any) -> torch.Tensor:
        """Vouch for no origin."""
        return torch.zeros(len(slots), dtype=torch.bool)


class _TimedPool(SplicePool):
    """A pool whose work on rows isn't counted."""

    def __init__(self, watch: Stopwatch, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._watch = watch

    def splice(self, source: Any, target: Any, source_start: int, dest_start: int) -> None:
        with self._watch.rows():
            super().splice(source, target, source_start, dest_start)

    def erase(self, slots: torch.Tensor) -> None:
        with self._watch.rows():
            for tensor in (*self.tensors.keys, *self.tensors.values):
                tensor.index_fill_(0, slots, 0)
        self.erased(slots)

    def erase_used(self, slots: torch.Tensor) -> None:
        with self._watch.rows():
            looked_at = self.tensors.keys[0].index_select(0, slots).flatten(1).any(dim=1)
            used = slots[looked_at]
        self.erase(used)


class Driver(Store):
    """One pool, one tree, and requests that run on command.

    Args:
        capacity: slots of the pool.
        longest: tokens of the longest request.
        page: tokens per page.
        leyline: False for stock SGLang.
        options: of :class:`SchedulerEngine`.
    """

    def __init__(
        self, capacity: int, longest: int, *, page: int = 1, leyline: bool = True, **options: Any
    ) -> None:
        super().__init__(
            LeylineRadixCache if leyline else UnifiedRadixCache, capacity, longest, page=page
        )
        self.watch = Stopwatch()
        if leyline:
            scrub = self.cache.scrub
            self.cache.scrub = self.watch.without(scrub)
        self.receipts = Receipts()
        self.engine = self._open_engine(longest, options) if leyline else None
        self.waiting: list[Req] = []
        self.running: list[Req] = []
        self.forwards = 0
        self.computed = 0
        """Tokens that forwards computed."""
        self._names = 0
        self._decodes: dict[str, int] = {}

    def _open_engine(self, longest: int, options: Any) -> SchedulerEngine:
        capability = Capability(
            engine="sglang",
            engine_version="bench",
            model="none",
            model_fingerprint="none",
            architecture="none",
            vocab_size=VOCABULARY,
            max_context=longest,
            splices=True,
        )
        tensors = read_pool(self.pool).turning(self.latent, ROTARY)
        pool = _TimedPool(self.watch, tensors, rotary_facts(), mover=_NoMover())
        arguments = {"secret": None, "salt": b"salt of the bench", "min_copy": 32, **options}
        return SchedulerEngine(
            self.cache, pool, capability, self.receipts, NoMetrics(), **arguments
        )

    def submit(
        self,
        prompt: array[int],
        payload: EditPayload | None = None,
        *,
        decode: int = 1,
        reuse: ReusePayload | None = None,
    ) -> Req:
        """Queue a request; the time that its envelope takes counts as a step's."""
        self._names += 1
        custom = None
        if payload is not None and self.engine is not None:
            envelope = edit_envelope(f"m{self._names}", payload, reuse=reuse)
            custom = {"kv_hints": msgspec.json.encode(envelope).decode()}
        parameters = SamplingParams(max_new_tokens=decode, ignore_eos=True, custom_params=custom)
        parameters.normalize(None)
        name = f"r{self._names:05d}"
        req = Req(name, "", prompt, parameters, vocab_size=VOCABULARY)
        self._decodes[name] = decode
        if self.engine is not None:
            with self.watch.before_step(), self.watch.part("receive"):
                self.engine.receive(req)
        self.waiting.append(req)
        return req

    def serve(
        self,
        prompt: array[int],
        payload: EditPayload | None = None,
        *,
        reuse: ReusePayload | None = None,
    ) -> TurnRecord | None:
        """Run one request to its end, alone; returns its record."""
        self.submit(prompt, payload, reuse=reuse)
        name = f"m{self._names}"
        while self.waiting or self.running:
            self.step()
        self.rest()
        return self.receipts.records.get(name)

    def rest(self) -> None:
        """Step until nothing is left to catch up on."""
        more = self.engine is not None
        while more:
            with self.watch.step(), self.watch.part("chores"):
                more = self.engine is not None and self.engine.chores.step()

    def step(self) -> None:
        """Admit and prefill what can be; else decode."""
        with self.watch.step():
            with self.watch.part("chores"):
                if self.engine is not None:
                    self.engine.chores.step()
            with self.watch.part("admit"):
                batch = self.admit()
            if batch:
                self._prefill(batch)
            else:
                self._decode()

    def admit(self) -> list[Req]:
        """Look at the waiting requests as SGLang's loop does; returns what runs next."""
        kind = LeylinePrefillAdder if self.engine is not None else PrefillAdder
        running = Batch(list(self.running))
        adder = kind(self.page, self.cache, self.allocator, running, 1.0, 1 << 22, None)
        for req in self.waiting:
            req.init_next_round_input(self.cache)
            if adder.add_one_req(req, False, None).name != "CONTINUE":
                break
        self.waiting = [req for req in self.waiting if req not in adder.can_run_list]
        return list(adder.can_run_list)

    def _prefill(self, batch: list[Req]) -> None:
        self.forwards += 1
        with self.watch.part("allocate"):
            for req in batch:
                self.begin(req)
                self.take(req, req.prefix_len, req.extend_end)
        self.computed += sum(req.extend_end - req.prefix_len for req in batch)
        with self.watch.part("publish"):
            if self.engine is not None:
                extend = SimpleNamespace(reqs=batch, forward_mode=ForwardMode.EXTEND)
                self.engine.prefilled(extend)
            for req in batch:
                self._sample(req)
                if req.finished():
                    release_kv_cache(req, self.cache, checkpoint=True)
                else:
                    checkpoint_kv_cache(req, self.cache)
                    self.running.append(req)

    def _decode(self) -> None:
        for req in tuple(self.running):
            position = req.kv.kv_committed_len
            self.take(req, position, position + 1)
            self._sample(req)
            if req.finished():
                with self.watch.part("publish"):
                    release_kv_cache(req, self.cache, checkpoint=True)
                self.running.remove(req)

    def _sample(self, req: Req) -> None:
        req.output_ids.append(_ANSWER)
        req.update_finish_state()
