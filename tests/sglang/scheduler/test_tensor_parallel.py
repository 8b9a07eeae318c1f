"""Ranks of one replica that settle something: real processes, joined by gloo."""

from __future__ import annotations

import multiprocessing
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch

from leyline_engine.sglang.tensor_parallel import (
    agreement,
    common_counts,
    common_rows,
    common_salt,
)

RANKS = 2
Found = tuple[bytes, list[bool], tuple[int, int], list[bool]]


def rank(number: int, meeting: str, answers: Queue[Any]) -> None:
    """One rank: it votes yes, but for the second one's first vote, and for a row of its own."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=number, world_size=RANKS
    )
    world = torch.distributed.group.WORLD
    salt, agree = common_salt(world), agreement(world)
    limits = common_counts(world, (32 + number, 64 + number))
    rows = common_rows(world)(torch.tensor([number != 0, number != 1, True]))
    answers.put((salt, [agree(number == 0), agree(True)], limits, rows.tolist()))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_ranks_share_a_salt_and_agree_only_together(tmp_path: Path) -> None:
    """All ranks hold the first one's salt and limits, and a no of one is the no of all."""
    spawn = multiprocessing.get_context("spawn")
    answers: Queue[Found] = spawn.Queue()
    ranks = [
        spawn.Process(target=rank, args=(number, str(tmp_path / "meeting"), answers))
        for number in range(RANKS)
    ]
    for process in ranks:
        process.start()
    found = [answers.get(timeout=120) for _ in ranks]
    for process in ranks:
        process.join(60)
    (salt, votes, limits, rows), other = found
    assert other == (salt, votes, limits, rows)
    assert limits == (32, 64)
    assert votes == [False, True]
    assert rows == [False, False, True]
    assert len(salt) == 32


def test_a_single_rank_draws_a_salt_at_each_start() -> None:
    """Without other ranks nothing is exchanged, and no start has the salt of another."""
    salts = {common_salt(None) for _ in range(4)}
    assert len(salts) == 4
    assert [agreement(None)(vote) for vote in (True, False)] == [True, False]
    assert common_rows(None)(torch.tensor([True, False])).tolist() == [True, False]
