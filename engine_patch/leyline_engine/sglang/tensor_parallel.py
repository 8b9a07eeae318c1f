"""Agreement among the tensor-parallel ranks of one replica.

They see the same requests in the same order and must decide alike, so facts that only one of them
knows go to all.
"""

from __future__ import annotations

from collections.abc import Callable
from secrets import token_bytes
from typing import Any

import torch

from leyline_engine.records.lineage import SALT_BYTES


def agreement(group: Any) -> Callable[[bool], bool]:
    """Return a vote of all ranks: True if every one votes True. Each asks at the same point.

    Args:
        group: their process group on the CPU; None for a single rank.
    """
    if _is_single(group):
        return bool

    def agree(succeeded: bool) -> bool:
        votes = torch.tensor([int(succeeded)])
        torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MIN, group=group)
        return bool(votes.item())

    return agree


def common_rows(group: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a vote of all ranks on rows: True where every one has True.

    Args:
        group: see :func:`agreement`.
    """
    if _is_single(group):
        return lambda rows: rows

    def common(rows: torch.Tensor) -> torch.Tensor:
        votes = rows.to(torch.uint8)
        torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MIN, group=group)
        return votes.bool()

    return common


def common_salt(group: Any) -> bytes:
    """Return a salt for names of lineages, drawn by the first rank and known to all.

    Args:
        group: see :func:`agreement`.
    """
    salt = token_bytes(SALT_BYTES)
    if _is_single(group):
        return salt
    drawn = torch.frombuffer(bytearray(salt), dtype=torch.uint8)
    torch.distributed.broadcast(drawn, group=group, group_src=0)
    return bytes(drawn.tolist())


def common_counts(group: Any, counts: tuple[int, int]) -> tuple[int, int]:
    """Return the first rank's counts on all ranks: plans that differ would be different trees.

    Args:
        group: see :func:`agreement`.
    """
    if _is_single(group):
        return counts
    drawn = torch.tensor(counts)
    torch.distributed.broadcast(drawn, group=group, group_src=0)
    first, second = drawn.tolist()
    return first, second


def _is_single(group: Any) -> bool:
    return group is None or torch.distributed.get_world_size(group=group) == 1
