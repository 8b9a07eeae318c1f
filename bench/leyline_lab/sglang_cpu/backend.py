"""``torch_native`` attention that computes the rows of new tokens only."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from leyline_lab.sglang_cpu.attention import attend_batch


class CpuAttentionBackend(TorchNativeAttnBackend):
    """SGLang's back end, without its padding of new queries to the length of the sequence.

    One new token after 4,000 cached ones costs SGLang's own 4,000 x 4,000 scores per head.

    Cross attention, sliding windows and attention that isn't causal stay with SGLang's own.
    """

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """Return the length of a row that pads a batch to the size of other ranks' batches.

        With data-parallel attention all ranks compute equally many tokens.
        """
        return 1

    def forward_extend(  # noqa: PLR0917
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        """Compute the attention of new tokens, drafts that are to be verified included."""
        if not forward_batch.forward_mode.is_target_verify():
            output: Tensor = super().forward_extend(
                q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache
            )
            return output
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v
            )
        drafts = int(forward_batch.spec_info.draft_token_num)
        lengths = forward_batch.seq_lens + drafts
        count = len(lengths)
        mask = forward_batch.spec_info.custom_mask[: count * drafts * drafts]
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        attended = q.new_empty((len(query), layer.tp_q_head_num, layer.v_head_dim))
        attend_batch(
            query,
            attended,
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            slots=_slots(
                self.req_to_token_pool.req_to_token, forward_batch.req_pool_indices, lengths
            ),
            new_tokens=[drafts] * count,
            scale=layer.scaling,
            seen=mask.view(count, drafts, drafts).bool(),
        )
        result: Tensor = attended.view(len(query), -1)
        return result

    def _run_sdpa_forward_extend(  # noqa: PLR0917 - SGLang calls it like this
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        extend_prefix_lens: Tensor,
        extend_seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Compute the attention of every new token of a batch; arguments as SGLang's."""
        if encoder_lens is not None or not options["causal"] or _special(options):
            original: Tensor = super()._run_sdpa_forward_extend(
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                req_pool_indices,
                seq_lens,
                extend_prefix_lens,
                extend_seq_lens,
                encoder_lens,
                **options,
            )
            return original
        slots = _slots(req_to_token, req_pool_indices, seq_lens)
        attend_batch(
            query,
            output,
            k_cache,
            v_cache,
            slots=slots,
            new_tokens=extend_seq_lens.tolist(),
            scale=options["scaling"],
        )
        return output

    def _run_sdpa_forward_decode(  # noqa: PLR0917
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Compute the attention of one new token per sequence; arguments as SGLang's."""
        if encoder_lens is not None or _special(options):
            original: Tensor = super()._run_sdpa_forward_decode(
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                req_pool_indices,
                seq_lens,
                encoder_lens,
                **options,
            )
            return original
        slots = _slots(req_to_token, req_pool_indices, seq_lens)
        attend_batch(
            query,
            output,
            k_cache,
            v_cache,
            slots=slots,
            new_tokens=[1] * len(slots),
            scale=options["scaling"],
        )
        return output


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

    def _run_sdpa_forward_decode(  # noqa: PLR0917
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        if self._topk == 1:
            return super()._run_sdpa_forward_decode(
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                req_pool_indices,
                seq_lens + self._drafted,
                encoder_lens,
                **options,
            )
        slots = branch_slots(
            _slots(req_to_token, req_pool_indices, seq_lens + self._topk * self._steps),
            self._topk,
            self._steps,
            self._drafted,
        )
        attend_batch(
            query,
            output,
            k_cache,
            v_cache,
            slots=slots,
            new_tokens=[1] * len(slots),
            scale=options["scaling"],
        )
        return output


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


def _special(options: dict[str, Any]) -> bool:
    """Return True if a layer attends to other than all earlier tokens of its own sequence."""
    return bool(options["is_cross_attn"]) or options["sliding_window_size"] is not None


def _slots(req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor) -> list[Tensor]:
    """Return, per sequence, the pool rows of its tokens by position."""
    lengths = zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    return [req_to_token[row, :length] for row, length in lengths]
