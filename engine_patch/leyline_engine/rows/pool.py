"""Splices and erasures of rows of an engine's KV pool.

Rounding must not accumulate over repeated splices, so the as-computed rotary key of a spliced row
is kept beside the pool, in a small ring. Engines write and free slots without notice; an entry is
therefore believed only if turning its key to the row's position gives, bit for bit, the slot's key.
Then using it is right by definition, whoever wrote the slot.

A key of 8 bits loses too much by a second rounding. There, a row that a splice turned is turned
again only while its as-computed key is kept; after that, its token has to be prefilled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from leyline_engine.proof.digests import Part, SlotRows
from leyline_engine.rotary.rotation import ModelRotary
from leyline_engine.rows.host import CopiedRows
from leyline_engine.rows.mover import Move, PoolTensors, RowMover, TorchMover
from leyline_engine.rows.origins import origin_rows
from leyline_engine.rows.paging import by_slot
from leyline_engine.rows.states import StatePool

_LOOKED_AT = 1 << 14
"""Rows per step of a check of their contents, which takes as much memory again."""


class OriginGoneError(Exception):
    """A row can't be turned: its as-computed key gave way, and its tokens must be prefilled."""


def choose_mover(tensors: PoolTensors, rotary: ModelRotary) -> RowMover:
    """Return the fused Triton mover on GPUs, and plain torch elsewhere."""
    if tensors.device.type != "cuda":
        return TorchMover(tensors, rotary)
    from leyline_engine.rows.kernel import TritonMover

    return TritonMover(tensors, rotary)


class SplicePool:
    """Rows of one KV pool, with the as-computed rotary keys of spliced ones beside them.

    Nothing here reads a clock, chance, or, on a GPU, a value back to the host: ranks stay alike.
    Only :meth:`turnable` of a pool of 8 bits reads one, and the ranks agree on it.
    """

    def __init__(
        self,
        tensors: PoolTensors,
        rotary: ModelRotary,
        *,
        origins: int | None = None,
        mover: RowMover | None = None,
        behind_forwards: Callable[[], None] = lambda: None,
        common: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows,
    ) -> None:
        """Wrap a pool.

        Args:
            tensors: the pool's, with their rotary band.
            rotary: rotations of the pool's layers, on any device.
            origins: as-computed keys to keep, at least 1; see :func:`.origins.origin_rows`. When
                more rows than that are spliced, the oldest keys give way. Their rows are turned
                from what they hold, one more rounding each time, or, if the pool has 8 bits, not
                any more.
            mover: by default the one for the pool's device.
            behind_forwards: orders all later work after the forwards in flight. With overlap
                scheduling, one of them may still write to a slot that was freed and taken again.
            common: returns True where all tensor-parallel ranks have True; takes this rank's rows,
                bool ``[n]`` on the host.
        """
        rows = origin_rows(tensors) if origins is None else origins
        if rows < 1:
            raise ValueError("a pool keeps at least one as-computed key")
        device = tensors.device
        self.tensors = tensors
        self.rotary = rotary.to(device)
        self.origins = rows
        self.behind_forwards = behind_forwards
        self.erased: Callable[[torch.Tensor], None] = lambda _: None
        """Called with slots that have been overwritten."""
        self.drafts: tuple[SplicePool, ...] = ()
        """Pools of draft models, which have rows of their own in the same slots."""
        self.host: CopiedRows | None = None
        """Copies of the rows in the host's memory."""
        self.window: SplicePool | None = None
        """Rows of layers with a sliding window, in slots of their own."""
        self.states: StatePool | None = None
        """Recurrent states, in slots of their own."""
        self._mover = choose_mover(tensors, self.rotary) if mover is None else mover
        heads = tensors.keys[0].shape[1]
        shape = (len(tensors.keys), rows, heads, tensors.rotary_dim)
        self._as_computed = torch.zeros(shape, dtype=tensors.stored, device=device)
        # The last entry takes keys of rows that claim none, so that a GPU need not be waited for.
        self._computed_at = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self._row_of = torch.full((tensors.slots,), -1, dtype=torch.int32, device=device)
        self._stands_at = torch.zeros(tensors.slots, dtype=torch.int32, device=device)
        self._next = torch.zeros((), dtype=torch.int64, device=device)
        self._common = common
        # How often an entry of the ring was claimed, and that number when a slot was given it.
        self._claims = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self._claims_then = torch.zeros(tensors.slots, dtype=torch.int32, device=device)
        self._turned = torch.zeros(tensors.slots, dtype=torch.bool, device=device)
        self._any_turned = False

    @property
    def bytes_beside(self) -> int:
        """Bytes on the device that are held beside the pool."""
        entries = (self._as_computed, self._computed_at, self._claims)
        by_slot = (self._row_of, self._stands_at, self._claims_then, self._turned)
        return sum(t.numel() * t.element_size() for t in (*entries, *by_slot))

    @property
    def as_computed(self) -> torch.Tensor:
        """The keys kept beside the pool, ``[layers, origins, heads, rotary_dim]``; a view."""
        return self._as_computed

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one slot over all layers, the draft models' included."""
        return self.tensors.bytes_per_token + sum(draft.bytes_per_token for draft in self.drafts)

    @property
    def every_tensor(self) -> list[SlotRows]:
        """All tensors, each by slot."""
        tensors = self.tensors
        found = [by_slot(keys, tensors.key_paging) for keys in tensors.keys]
        found += [by_slot(values, tensors.value_paging) for values in tensors.values]
        return found + [tensor for draft in self.drafts for tensor in draft.every_tensor]

    def parts(self) -> list[Part]:
        """Return the tensors whose rows depend on the tokens in front of them.

        Those of the first layer depend on a row's own token alone, but for a draft model, which
        reads the target's hidden states.
        """
        return self._parts(1, "") + self.draft_parts()

    def draft_parts(self) -> list[Part]:
        """Return those of the draft models, whose rows have read one token more."""
        every = enumerate(self.drafts)
        return [part for number, draft in every for part in draft._parts(0, f"draft {number} ")]

    def _parts(self, first: int, name: str) -> list[Part]:
        tensors, found = self.tensors, list[Part]()
        start, end = tensors.rotary_start, tensors.rotary_start + tensors.rotary_dim
        origins = self._row_of.cpu().numpy().astype(np.int64)
        for layer in range(first, len(tensors.keys)):
            key, paging = tensors.keys[layer], tensors.key_paging
            others = [
                (values, tensors.value_paging) for values in tensors.values[layer : layer + 1]
            ]
            others += [(key[..., :start], paging), (key[..., end:], paging)]
            found += [
                Part("pool", f"{name}free {layer} {part}", by_slot(rows, where))
                for part, (rows, where) in enumerate(others)
                if rows.shape[-1]
            ]
            turned = f"{name}turned {layer}"
            found.append(Part("pool", turned, by_slot(key[..., start:end], paging)))
            found.append(Part("origin", turned, self._as_computed[layer], origins))
        return found

    def splice(
        self, source: torch.Tensor, target: torch.Tensor, source_start: int, dest_start: int
    ) -> None:
        """Copy rows to other slots and turn their keys to new positions, in all layers.

        All but the rotary part of a key stays bit-identical. Each row is gathered, turned and
        scattered once per layer.

        Args:
            source: int64 ``[n]`` slots on the pool's device; row i is at ``source_start + i``.
            target: int64 ``[n]`` slots, distinct, none of them in ``source``; row i will be at
                ``dest_start + i``.

        Raises:
            ValueError: the two have different lengths.
            OriginGoneError: a row can't be turned; nothing was done, on any rank.
        """
        count = len(source)
        if len(target) != count:
            raise ValueError(f"{count} source slots and {len(target)} target slots")
        if count == 0:
            return
        turnable = None if dest_start == source_start else self.turnable(source)
        if turnable is not None and not bool(turnable.all()):
            raise OriginGoneError(f"as-computed keys of {int((~turnable).sum())} rows gave way")
        self.behind_forwards()
        positions = torch.arange(count, dtype=torch.int64, device=source.device)
        stands_at, needed_at = positions + source_start, positions + dest_start
        origin = self._certified_rows(source, stands_at)
        claimed = torch.full_like(origin, -1)
        if dest_start != source_start:
            claimed = self._claim(origin)
        computed_at = self._positions_of(origin, stands_at)
        self._mover.move(
            Move(source, target, origin, claimed, computed_at, needed_at), self._as_computed
        )
        entry = torch.maximum(origin, claimed)
        self._computed_at[claimed] = stands_at
        self._row_of[target] = entry.to(torch.int32)
        self._stands_at[target] = needed_at.to(torch.int32)
        if self.tensors.packed is not None:
            self._claims[claimed] += 1
            self._claims_then[target] = self._claims[entry]
            lost = self._turned[source] & (origin < 0)
            self._turned[target] = (computed_at != needed_at) | lost
            self._any_turned = True
        for draft in self.drafts:
            draft.splice(source, target, source_start, dest_start)

    def copy_state(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy recurrent states of slots, int64 ``[n]``, to others."""
        if self.states is not None:
            self.states.copy(source, target)

    def turnable(self, slots: torch.Tensor) -> torch.Tensor | None:
        """Return which rows may be turned: bool ``[n]`` on the host, the same on all ranks.

        None: all of them, which needs no look at the device. That is so but for pools of 8 bits
        after their first splice. There, a row that was turned may be turned again only as long as
        its as-computed key is kept. Rows may always be copied to their own position.

        Args:
            slots: int64 ``[n]`` on the pool's device.
        """
        pools = [pool for pool in (self, *self.drafts) if pool._any_turned]
        if not pools:
            return None
        every = torch.stack([pool._kept(slots) | ~pool._turned[slots] for pool in pools]).all(dim=0)
        return self._common(every.cpu())

    def _kept(self, slots: torch.Tensor) -> torch.Tensor:
        """Return True for rows whose entry in the ring was claimed by nobody since."""
        entry = self._row_of[slots].to(torch.int64)
        return (entry >= 0) & (self._claims[entry] == self._claims_then[slots])

    def freed(self, slots: Sequence[torch.Tensor]) -> None:
        """Record that slots, int64 each, hold no splice's rows any more: others may write to them.

        A slot of which this isn't recorded may be taken for one whose as-computed key gave way.
        """
        for pool in (self, *self.drafts):
            if pool._any_turned and slots:
                pool._turned[torch.cat(tuple(slots))] = False

    def loaded(self, slots: torch.Tensor) -> None:
        """Record that slots, int64 ``[n]``, hold copies of rows that stood elsewhere.

        A splice may have turned those, and how is forgotten: with 8 bits, they count as turned.
        """
        if self.tensors.packed is not None:
            self._row_of[slots], self._stands_at[slots] = -1, 0
            self._turned[slots] = self._any_turned = True

    def emptied(self) -> None:
        """Record that no slot holds a splice's row any more."""
        for pool in (self, *self.drafts):
            pool._turned.zero_()
            pool._any_turned = False

    def blank_drafts(self, slots: torch.Tensor) -> None:
        """Overwrite the draft models' rows of these slots, int64 ``[n]``, and nothing else.

        Their as-computed keys go with the next erasure.
        """
        for draft in self.drafts:
            draft._overwrite(slots)

    def _certified_rows(self, slots: torch.Tensor, stands_at: torch.Tensor) -> torch.Tensor:
        """Return rows with the as-computed keys of ``slots``, int64; -1 if none is certified."""
        rows = self._row_of[slots].to(torch.int64)
        if self.tensors.packed is not None:
            # Eight bits agree by chance where a key is short: its history must fit as well.
            rows = torch.where(self._turned[slots] & self._kept(slots), rows, -1)
        computed_at = self._positions_of(rows, stands_at)
        certified = self._mover.certify(slots, rows, computed_at, stands_at, self._as_computed)
        return torch.where(certified, rows, -1)

    def _positions_of(self, rows: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
        """Return the positions at which the keys of ``rows`` were computed; ``otherwise`` for -1.

        A row of -1 reads the spare entry.
        """
        return torch.where(rows >= 0, self._computed_at[rows], otherwise)

    def _claim(self, origin: torch.Tensor) -> torch.Tensor:
        """Return ring rows for slots without an origin, oldest first; -1 if none is left.

        Origins that this splice turns from are skipped, so no key is read and replaced at once.
        """
        ring = (torch.arange(self.origins, device=origin.device) + self._next) % self.origins
        in_use = torch.zeros(self.origins + 1, dtype=torch.bool, device=origin.device)
        in_use[origin] = True  # -1 marks the spare entry
        free = ~in_use[ring]
        by_rank = torch.zeros(self.origins + 1, dtype=torch.int64, device=origin.device)
        by_rank[torch.where(free, free.cumsum(0) - 1, -1)] = ring
        asking = origin < 0
        rank = asking.cumsum(0) - 1
        granted = asking & (rank < free.sum())
        claimed = torch.where(granted, by_rank[rank.clamp(0, self.origins)], -1)
        age = torch.where(granted, (claimed - self._next) % self.origins, -1)
        self._next = (self._next + age.max() + 1) % self.origins
        return claimed

    def erase(self, slots: torch.Tensor) -> None:
        """Overwrite rows, in all layers, and the as-computed keys that no spliced row vouches for.

        After this, the keys beside the pool are of rows that the pool still holds.

        Args:
            slots: int64 ``[n]`` on the pool's device.
        """
        self.behind_forwards()
        self._overwrite(slots)
        self._drop_orphans()
        for draft in self.drafts:
            draft.erase(slots)
        self.erased(slots)

    def _overwrite(self, slots: torch.Tensor) -> None:
        tensors = self.tensors
        for every, rows in (
            (tensors.keys, tensors.key_rows(slots)),
            (tensors.values, tensors.value_rows(slots)),
        ):
            for tensor in every:
                tensor.index_fill_(0, rows, 0)
        self._row_of[slots] = -1
        self._stands_at[slots] = 0
        self.freed([slots])

    def erase_used(self, slots: torch.Tensor) -> None:
        """Overwrite those of these rows that hold anything, as :meth:`erase` does.

        A row that has read something isn't zero in both the first layer and the last.

        Args:
            slots: int64 ``[n]`` on the pool's device, no longer read by any request.
        """
        self.behind_forwards()
        looked_at = {id(layer): layer for layer in (self.tensors.keys[0], self.tensors.keys[-1])}
        used = [slots[:0]]
        for part in torch.split(slots, _LOOKED_AT):
            holds = torch.zeros(len(part), dtype=torch.bool, device=slots.device)
            rows = self.tensors.key_rows(part)
            for layer in looked_at.values():
                holds |= layer.index_select(0, rows).flatten(1).any(dim=1)
            used.append(part[holds])
        self.erase(torch.cat(used))
        for draft in self.drafts:
            draft.erase_used(slots)

    def _drop_orphans(self) -> None:
        holders = torch.nonzero(self._row_of >= 0).flatten()
        rows = self._certified_rows(holders, self._stands_at[holders].to(torch.int64))
        self._row_of[holders] = rows.to(torch.int32)
        orphaned = torch.ones(self.origins + 1, dtype=torch.bool, device=rows.device)
        orphaned[rows[rows >= 0]] = False
        orphans = torch.nonzero(orphaned[:-1]).flatten()
        self._as_computed.index_fill_(1, orphans, 0)
        self._computed_at.index_fill_(0, orphans, 0)
