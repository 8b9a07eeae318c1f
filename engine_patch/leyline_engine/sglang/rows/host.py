"""Rows of SGLang's KV pool in the host's memory (HiCache): copies of slots, each in one of its own.

SGLang copies whole nodes of its tree to the host and back, bit by bit. Leyline never moves these
rows, it only overwrites them. A host slot that SGLang frees still holds its row until another is
copied to it, so freed ones are remembered until then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from leyline_engine.proof.digests import Part, filled
from leyline_engine.proof.witness import Slots
from leyline_engine.rows.mover import PoolTensors
from leyline_engine.sglang.rows.layouts import UnsupportedPoolError

HOST = "host"
"""The place of a proof to which these rows belong."""
_PACKAGE = "sglang.srt.mem_cache.pool_host"
_LATENT = f"{_PACKAGE}.mla.MLATokenToKVPoolHost"
_HEADS = f"{_PACKAGE}.mha.MHATokenToKVPoolHost"
_SLOT_DIMENSIONS = {"layer_first": 1, "page_first": 0}
"""The dimension of a buffer that counts slots, by ``--hicache-mem-layout``."""
_STAGING = ("staging_buffer", "staging_k_buffer", "staging_v_buffer")


class HostRows:
    """Rows of one host pool.

    Args:
        pool: one of SGLang's host pools.
        tensors: the device's pool, of which it has copies.
        behind_copies: orders all later work on the device after the copies to the host.

    Raises:
        UnsupportedPoolError: the host's pool is of another form than the device's.
    """

    def __init__(
        self,
        pool: Any,
        tensors: PoolTensors,
        *,
        behind_copies: Callable[[], None] = lambda: None,
    ) -> None:
        kind = f"{type(pool).__module__}.{type(pool).__qualname__}"
        if (
            kind not in {_LATENT, _HEADS}
            or pool.layout not in _SLOT_DIMENSIONS
            or pool.dcp_size != 1
        ):
            raise UnsupportedPoolError(f"host pool {type(pool).__qualname__} {pool.layout}")
        buffers = (pool.kv_buffer,) if kind == _LATENT else (pool.k_buffer, pool.v_buffer)
        if any(buffer is None for buffer in buffers):
            raise UnsupportedPoolError("a host pool that another rank holds")
        if tensors.key_paging is not None:
            raise UnsupportedPoolError("hierarchical cache with SGLANG_USE_HND_KVCACHE")
        self._pool = pool
        self._keys = tuple(pool.data_refs if kind == _LATENT else pool.k_data_refs)
        self._values = () if kind == _LATENT else tuple(pool.v_data_refs)
        self._tensors = tensors
        every = zip((*self._keys, *self._values), (*tensors.keys, *tensors.values), strict=False)
        layers = len(self._keys) == len(tensors.keys) and len(self._values) == len(tensors.values)
        if not layers or any(
            (host.shape[1:], host.dtype) != (device.shape[1:], device.dtype)
            for host, device in every
        ):
            raise UnsupportedPoolError("a host pool with other rows than the device's")
        by_layer = _SLOT_DIMENSIONS[pool.layout] == 1
        planes = [part for each in buffers for part in (each.unbind(0) if by_layer else (each,))]
        self._planes = tuple(plane.view(torch.uint8) for plane in planes)
        staging = (getattr(pool, name, None) for name in _STAGING)
        self._staging = tuple(tensor for tensor in staging if tensor is not None)
        self._behind_copies = behind_copies
        self._stale = torch.zeros(len(self._keys[0]), dtype=torch.bool)
        """Host slots that hold what was freed there, but for those that were written since."""
        self.erased: Callable[[torch.Tensor], None] = lambda _: None
        """Called with rows that have been overwritten, numbered as in proofs."""

    def __len__(self) -> int:
        return len(self._stale)

    def numbers(self, slots: Slots) -> Slots:
        """Return host slots as proofs number them: after all of the device's."""
        return slots + self._tensors.slots

    def freed(self, slots: torch.Tensor) -> None:
        """Record that SGLang freed host slots, int64 ``[n]``; their rows stay there."""
        self._stale[slots.cpu()] = True

    def emptied(self) -> None:
        """Record that SGLang is about to free all slots."""
        self._stale |= self._pool.slot_used

    def is_stale(self, slots: torch.Tensor) -> bool:
        """Return True if any of these slots, int64 ``[n]``, may hold what was freed there."""
        return bool(self._stale[slots.cpu()].any())

    def erase(self, slots: torch.Tensor) -> None:
        """Overwrite the rows of host slots, int64 ``[n]``, in all layers.

        Nobody may be copying from or to them.
        """
        slots = slots.cpu()
        for plane in self._planes:
            plane.index_fill_(0, slots, 0)
        self._stale[slots] = False
        self.erased(slots + self._tensors.slots)

    def scrub(self) -> None:
        """Overwrite what free slots still hold, and what copies to the host left on their way."""
        stale = torch.nonzero(self._stale & ~self._pool.slot_used).flatten()
        if len(stale):
            self.erase(stale)
        if self._staging:
            self._behind_copies()
            for tensor in self._staging:
                tensor.zero_()

    def parts(self) -> list[Part]:
        """Return what :meth:`.rows.pool.SplicePool.parts` has of the last layer, free of positions.

        A copy has all of a row, and looking at every layer would take the host minutes.
        """
        last, tensors = len(self._keys) - 1, self._tensors
        if not last:
            return []
        start, end = tensors.rotary_start, tensors.rotary_start + tensors.rotary_dim
        key = self._keys[last]
        others = [*self._values[last:], key[..., :start], key[..., end:]]
        return [
            Part(HOST, f"free {last} {part}", rows, first=tensors.slots)
            for part, rows in enumerate(others)
            if rows.shape[-1]
        ]

    def filled_free(self) -> Slots:
        """Return the free rows that hold anything in the first layer or the last, by number."""
        free = torch.nonzero(~self._pool.slot_used).flatten()
        ends = {id(each[0]): each[0] for each in (self._keys, self._values[:1]) if each}
        ends[id(self._keys[-1])] = self._keys[-1]
        return self.numbers(filled(list(ends.values()), free.numpy()))


def open_host_rows(tree: Any, tensors: PoolTensors) -> HostRows:
    """Return the rows of a tree's host pool.

    Args:
        tree: SGLang's tree, with a controller of its hierarchical cache.
        tensors: the device's pool.

    Raises:
        UnsupportedPoolError: there is more than one host pool, or one of another form.
    """
    entries = tree.host_pool_group.entries
    if len(entries) != 1:
        raise UnsupportedPoolError(f"{len(entries)} host pools")
    device = torch.get_device_module(tensors.device)
    stream = tree.cache_controller.l2_transfer_engine.device_to_host_stream
    return HostRows(
        entries[0].host_pool,
        tensors,
        behind_copies=lambda: device.current_stream().wait_stream(stream),
    )
