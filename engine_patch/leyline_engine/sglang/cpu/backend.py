"""``torch_native`` attention that computes the rows of new tokens only."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor

from leyline_engine.sglang.cpu.attention import attend_batch


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


def _special(options: dict[str, Any]) -> bool:
    """Return True if a layer attends to other than all earlier tokens of its own sequence."""
    return bool(options["is_cross_attn"]) or options["sliding_window_size"] is not None


def _slots(req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor) -> list[Tensor]:
    """Return, per sequence, the pool rows of its tokens by position."""
    lengths = zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    return [req_to_token[row, :length] for row, length in lengths]
