"""The scheduler without a model, with EAGLE's draft model beside it: pairs of tokens as tree keys,
and a second pool in the same slots.

A row of the draft's pool holds the token after the row's own, the digest of all before, and a nonce
of the computation. So a test can ask which secrets it has read, that next token included.
"""

from __future__ import annotations

from typing import Any

import torch
from scheduler_kit import SECRETS, VOCABULARY, Scheduler, histories
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from leyline_engine.rotary.rotation import Pairing, Rotary
from leyline_engine.rows.pool import SplicePool
from leyline_engine.sglang.rows.layouts import read_pool

_WIDTH, _LAYERS, _LONGEST = 8, 2, 4096
_INV_FREQ = 1.0 / 500.0 ** (torch.arange(0, _WIDTH, 2, dtype=torch.float32) / _WIDTH)


class DraftScheduler(Scheduler):
    """A scheduler whose requests write to two pools."""

    def __init__(self, capacity: int = 2000, **options: Any) -> None:
        super().__init__(capacity, eagle=True, **options)
        self.draft_pool = MHATokenToKVPool(
            self.capacity, self.page, torch.float32, 1, _WIDTH, _LAYERS, "cpu", False
        )
        rotary = Rotary(_INV_FREQ, Pairing.HALF_SPLIT)
        if self.splicing is not None:
            draft = SplicePool(read_pool(self.draft_pool).turning(0, _WIDTH), rotary)
            self.splicing.drafts = (draft,)
        places = torch.arange(_LONGEST)
        ones = torch.ones(_LONGEST, 1, _WIDTH)
        self.draft_keys = rotary.rotate(ones, torch.zeros_like(places), places)[:, 0]
        self.blank = 0
        """Draft rows without content that requests have used."""

    def _compute(self, req: Req, start: int, end: int) -> None:
        super()._compute(req, start, end)
        tokens = list((req.origin_input_ids + req.output_ids)[: end + 1])
        if len(tokens) == end:
            tokens.append(sum(self._remembered(req)) % VOCABULARY)  # what is sampled next
        rows = []
        for position, (_, history, nonce) in enumerate(self.rows_of(req)[start:end], start):
            following = tokens[position + 1]
            mine = next(self._nonce)
            secret = {following} if following >= SECRETS else set()
            self.has_read[mine] = self.has_read[nonce] | secret
            rows.append([following, history, mine, 1, 0, 0, 0, 0])
        slots = self.slots_of(req)[start:end].long()
        for layer in range(_LAYERS):
            self.draft_pool.v_buffer[layer][slots, 0] = torch.tensor(rows, dtype=torch.float32)
            self.draft_pool.k_buffer[layer][slots, 0] = self.draft_keys[start:end]

    def read_drafts(self, slots: torch.Tensor) -> list[tuple[int, int, int]]:
        """(next token, history, nonce) of each slot's draft row; nonce 0 if it is blank."""
        rows = self.draft_pool.v_buffer[-1][slots.long(), 0, :3].long()
        return [(int(t), int(h), int(n)) for t, h, n in rows]

    def remembered(self, slots: torch.Tensor | None = None) -> frozenset[int]:
        """Every secret that the KV in ``slots`` has read, the draft model's included."""
        where = self.cache.all_values_flatten() if slots is None else slots
        found = set(super().remembered(where))
        for _, _, nonce in self.read_drafts(where):
            found |= self.has_read[nonce]
        return frozenset(found)

    def check_rows(self, req: Req) -> None:
        """The draft rows, too, are those of the request's tokens, at their positions."""
        super().check_rows(req)
        tokens = list(req.origin_input_ids + req.output_ids)
        computed = req.kv.kv_committed_len
        turn = self.engine.turn_of(req)
        exact = turn.lineage[0].start if turn is not None and turn.lineage else computed
        slots = self.slots_of(req)[:computed]
        wanted = histories(tokens)
        for position, (following, history, nonce) in enumerate(self.read_drafts(slots)):
            key = self.draft_pool.k_buffer[-1][int(slots[position]), 0]
            if not nonce:
                self.blank += 1
                assert position >= exact, "an exact draft row is blank"
                assert not key.any()
                continue
            assert torch.allclose(key, self.draft_keys[position], atol=1e-4), "a draft key is off"
            if position + 1 < len(tokens):
                assert following == tokens[position + 1], "a draft row of another pair"
            if position < exact:
                assert history == wanted[position], "foreign memory in a draft row"
