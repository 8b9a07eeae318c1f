"""Rows of the engine's own that compute the gaps between copies."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from leyline_engine.sglang.turn import Turn


class StageRow(Req):
    """A prefill-only request of the engine's own that computes one gap of a turn."""

    def __init__(self, turn: Turn, end: int) -> None:
        parent = turn.req
        parameters = SamplingParams(max_new_tokens=0)
        parameters.normalize(None)
        super().__init__(
            f"{parent.rid}.gap{end}",
            "",
            parent.origin_input_ids[:end],
            parameters,
            eos_token_ids=parent.eos_token_ids,
            vocab_size=parent.vocab_size,
            cache_salt=parent.cache_salt,
            priority=parent.priority,
            http_worker_ipc=parent.http_worker_ipc,
        )
        # The row computes what its turn would; SGLang would append the adapter to the key again.
        self.lora_id, self.extra_key = parent.lora_id, parent.extra_key
        # SGLang reads the stop tokens of a whole batch from it if one request has ``min_tokens``.
        self.tokenizer = parent.tokenizer
        # None are wanted. With data-parallel attention, other ranks must know how many there are.
        self.logprob_start_len = -1
        self.leyline = turn
        self.end = end
        self.launched = False
        """True once a forward is launched that computes the last of it."""
        self.complete = False
        """True once its gap is in the tree."""


def note_launched(batch: Any) -> None:
    """Note the rows whose last tokens a batch computes that SGLang is about to launch."""
    for req in batch.reqs:
        if isinstance(req, StageRow):
            req.launched = req.extend_end == req.end
