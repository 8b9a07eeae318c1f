"""``torch_native`` attention that computes the rows of new tokens only, with windows and sinks."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from leyline_lab.sglang_cpu.attention import Scoring, attend_batch


class CpuAttentionBackend(TorchNativeAttnBackend):
    """SGLang's back end, without its padding of new queries to the length of the sequence.

    One new token after 4,000 cached ones costs SGLang's own 4,000 x 4,000 scores per head. Nor
    does it know sinks and capped scores, or read a window's rows where their pool has them.

    Cross attention and attention that isn't causal stay with SGLang's own.
    """

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """Return the length of a row that pads a batch to the size of other ranks' batches.

        With data-parallel attention all ranks compute equally many tokens.
        """
        return 1

    def forward_extend(  # noqa: PLR0917
        self,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute the attention of new tokens, drafts that are to be verified included."""
        if layer.is_cross_attention or layer.attn_type == AttentionType.ENCODER_ONLY:
            output: Tensor = super().forward_extend(
                q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache
            )
            return output
        if save_kv_cache and k is not None:
            self._save(k, v, layer, forward_batch)
        lengths, seen = forward_batch.seq_lens, None
        if forward_batch.forward_mode.is_target_verify():
            count, drafts = len(lengths), int(forward_batch.spec_info.draft_token_num)
            mask = forward_batch.spec_info.custom_mask[: count * drafts * drafts]
            lengths, seen = lengths + drafts, mask.view(count, drafts, drafts).bool()
            new_tokens = [drafts] * count
        else:
            new_tokens = forward_batch.extend_seq_lens.tolist()
        slots = self._slots(forward_batch, lengths)
        return self._attended(q, layer, slots, new_tokens, sinks, seen)

    def forward_decode(  # noqa: PLR0917
        self,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute the attention of one new token per sequence."""
        if layer.is_cross_attention:
            output: Tensor = super().forward_decode(
                q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache
            )
            return output
        if save_kv_cache and k is not None:
            self._save(k, v, layer, forward_batch)
        slots = self._decoding_slots(forward_batch)
        return self._attended(q, layer, slots, [1] * len(slots), sinks)

    def _save(self, k: Any, v: Any, layer: Any, forward_batch: Any) -> None:
        where = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
        self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)

    def _decoding_slots(self, forward_batch: Any) -> list[Tensor]:
        return self._slots(forward_batch, forward_batch.seq_lens)

    def _slots(self, forward_batch: Any, lengths: Tensor) -> list[Tensor]:
        """Return, per sequence, the pool rows of its tokens by position."""
        rows = zip(forward_batch.req_pool_indices.tolist(), lengths.tolist(), strict=True)
        table = self.req_to_token_pool.req_to_token
        return [table[row, :length] for row, length in rows]

    def _attended(  # noqa: PLR0917
        self,
        q: Tensor,
        layer: Any,
        slots: list[Tensor],
        new_tokens: list[int],
        sinks: Tensor | None,
        seen: Tensor | None = None,
    ) -> Tensor:
        pool = self.token_to_kv_pool
        window = layer.sliding_window_size
        if window is None or window < 0:
            window = None
        else:
            # Rows in front of every window may be gone.
            slots = [row[-window - count :] for row, count in zip(slots, new_tokens, strict=True)]
        if self.use_sliding_window_kv_pool and pool.layers_mapping[layer.layer_id][1]:
            slots = [pool.translate_loc_from_full_to_swa(row) for row in slots]
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        attended = q.new_empty((len(query), layer.tp_q_head_num, layer.v_head_dim))
        attend_batch(
            query,
            attended,
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            slots=slots,
            new_tokens=new_tokens,
            scoring=Scoring(layer.scaling, window, layer.logit_cap, sinks),
            seen=seen,
        )
        return attended.flatten(1)


class CpuDraftBackend(CpuAttentionBackend):
    """Attention of one step of a draft: the tokens drafted before it count, too.

    Each branch of a tree (``--speculative-eagle-topk`` above 1) reads its own slots, as with
    SGLang's own back ends. If it took another branch's candidate, it still reads its own drafts.

    Args:
        runner: the draft model's.
        step: tokens of a branch that were drafted before.
        steps: slots of a branch.
        topk: branches of a request.
    """

    def __init__(self, runner: Any, step: int, steps: int, topk: int) -> None:
        super().__init__(runner)
        self._drafted = step + 1
        self._steps = steps
        self._topk = topk

    def _decoding_slots(self, forward_batch: Any) -> list[Tensor]:
        if self._topk == 1:
            return self._slots(forward_batch, forward_batch.seq_lens + self._drafted)
        rows = self._slots(forward_batch, forward_batch.seq_lens + self._topk * self._steps)
        return branch_slots(rows, self._topk, self._steps, self._drafted)


class CpuDraftBackends:
    """The attention of all steps of a draft.

    Args:
        runner: the draft model's.
        steps: tokens that are drafted one after the other.
        topk: branches of a request; 1 for a chain.
    """

    def __init__(self, runner: Any, steps: int, topk: int) -> None:
        self.attn_backends = [
            CpuDraftBackend(runner, step, steps, topk) for step in range(steps - 1)
        ]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare all steps."""
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


def branch_slots(rows: list[Tensor], topk: int, steps: int, drafted: int) -> list[Tensor]:
    """Return the slots that each branch of each request attends to, in the order of its query.

    Args:
        rows: per request, the slots of its tokens, then ``steps`` of each branch.
        topk: branches of a request.
        drafted: slots of a branch that are filled.
    """
    found = []
    for row in rows:
        length = len(row) - topk * steps
        starts = range(length, len(row), steps)
        found += [torch.cat([row[:length], row[start : start + drafted]]) for start in starts]
    return found
