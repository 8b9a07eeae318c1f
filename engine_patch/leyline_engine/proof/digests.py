"""Digests of rows of a KV pool, on the pool's own device.

A row's bytes, as 32-bit lanes ``x``, are hashed four times by multiply-shift over a secret vector
``r``: ``(sum of r * x mod 2**64) >> 32``. Each is universal (Dietzfelbinger, "Universal hashing and
k-wise independent random variables via integer arithmetic without primes", STACS 1996): two
different rows agree in all four with a probability of 2**-124 at most.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import shake_256
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from leyline_engine.proof.witness import Slots

Digests = NDArray[np.uint64]
"""``[n, 2]``: 128 bits per row."""

_HASHES = 4
_LANES_AT_ONCE = 1 << 21
_LOW = 0xFFFF_FFFF


class SlotRows(Protocol):
    """Rows ``[n, ...]``: a tensor, or what reads them from where they lie apart."""

    def __len__(self) -> int:
        """Return n."""

    def __getitem__(self, entries: slice | torch.Tensor, /) -> torch.Tensor:
        """Return the rows of entries, int64, or of a range of them."""

    @property
    def device(self) -> torch.device:
        """The device of the rows."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a pool, or a part of each of its rows.

    Attributes:
        place: place of a proof to which its rows belong.
        group: names what its rows are; equal rows of one group are equal KV.
        rows: ``[n, ...]``, one entry per slot, or per entry that :attr:`entry_of` names.
        entry_of: entry by slot, -1 for none; None if entries are consecutive slots.
        first: number of the first of those; others have no entry.
    """

    place: str
    group: str
    rows: SlotRows
    entry_of: Slots | None = None
    first: int = 0

    def entries(self, slots: Slots) -> Slots:
        """Return the entry of each slot, -1 for none."""
        count = len(self.rows) if self.entry_of is None else len(self.entry_of)
        entries = slots - self.first
        entries = np.where((entries >= 0) & (entries < count), entries, -1)
        if self.entry_of is None:
            return entries
        return np.where(entries >= 0, self.entry_of[entries], -1)

    def at(self, entries: Slots) -> torch.Tensor:
        """Return the rows of entries."""
        return self.rows[torch.from_numpy(entries).to(self.rows.device)]

    def slots(self, entries: Collection[int]) -> Mapping[int, Sequence[int]]:
        """Return the slots whose content entries are, by entry; one pass over all slots."""
        if self.entry_of is None:
            return {entry: [entry + self.first] for entry in entries}
        found: dict[int, list[int]] = {entry: [] for entry in entries}
        wanted = np.fromiter(entries, dtype=np.int64, count=len(entries))
        for slot in np.flatnonzero(np.isin(self.entry_of, wanted)).tolist():
            found[int(self.entry_of[slot])].append(slot)
        return found


class RowDigester:
    """Digests rows under one key.

    Args:
        nonce: the key; nobody can make rows for it who doesn't know it.
    """

    def __init__(self, nonce: bytes) -> None:
        self._nonce = nonce
        self._vectors: dict[tuple[int, torch.device], torch.Tensor] = {}

    def digest(self, rows: SlotRows) -> Digests:
        """Return the digests of rows ``[n, ...]``; rows without content have the digest 0."""
        found = [self._of(part) for part in _portions(rows)]
        return np.concatenate(found) if found else np.empty((0, 2), dtype=np.uint64)

    def _of(self, rows: torch.Tensor) -> Digests:
        lanes = _lanes(rows)
        vectors = self._vector(lanes.shape[1], lanes.device)
        sums = torch.stack([(lanes * vector).sum(1) for vector in vectors])
        high = ((sums >> 32) & _LOW).cpu().numpy().astype(np.uint64)
        shift = np.uint64(32)
        return np.stack([high[0] << shift | high[1], high[2] << shift | high[3]], axis=1)

    def _vector(self, lanes: int, device: torch.device) -> torch.Tensor:
        """Return ``[hashes, lanes]`` secret int64."""
        known = self._vectors.get((lanes, device))
        if known is None:
            size = _HASHES * lanes * 8
            raw = shake_256(self._nonce + lanes.to_bytes(8, "little")).digest(size)
            drawn = np.frombuffer(raw, dtype=np.int64).reshape(_HASHES, lanes).copy()
            known = torch.from_numpy(drawn).to(device)
            self._vectors[lanes, device] = known
        return known


def filled(tensors: Sequence[SlotRows], slots: Slots) -> Slots:
    """Return those of some slots that aren't zero in all of a pool's tensors."""
    found = np.zeros(len(slots), dtype=np.bool_)
    for tensor in tensors:
        rows = max(1, _LANES_AT_ONCE * 4 // max(1, tensor[:1].nbytes))
        for start in range(0, len(slots), rows):
            at = torch.from_numpy(slots[start : start + rows]).to(tensor.device)
            raw = tensor[at].reshape(len(at), -1).contiguous().view(torch.uint8) != 0
            found[start : start + rows] |= raw.any(dim=1).cpu().numpy()
    return slots[found]


def _portions(rows: SlotRows) -> Iterator[torch.Tensor]:
    """Yield rows in portions that bound the memory of a step."""
    step = max(1, _LANES_AT_ONCE // max(1, rows[:1].nbytes // 4))
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def _lanes(rows: torch.Tensor) -> torch.Tensor:
    """Return the bytes of rows as int64 lanes of 32 bits, padded with zeros."""
    raw = rows.reshape(len(rows), -1).contiguous().view(torch.uint8)
    short = -raw.shape[1] % 4
    if short:
        raw = torch.nn.functional.pad(raw, (0, short))
    return raw.contiguous().view(torch.int32).to(torch.int64) & _LOW
