"""SGLang's pages: slots that are allocated and freed together, with or without a token in each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def whole_pages(slots: torch.Tensor, page: int) -> torch.Tensor:
    """Return all slots of the pages that have any of ``slots``, int64, each once."""
    if page == 1:
        return slots.to(torch.int64)
    return slots_of_pages(torch.unique(slots.to(torch.int64) // page), page)


def slots_of_pages(pages: torch.Tensor, page: int) -> torch.Tensor:
    """Return the slots of pages, int64 ``[len(pages) * page]``."""
    places = torch.arange(page, dtype=torch.int64, device=pages.device)
    return (pages.to(torch.int64)[:, None] * page + places).reshape(-1)


def free_slots(allocator: Any) -> torch.Tensor:
    """Return all free slots, int64, with those that a batch is about to free.

    Args:
        allocator: SGLang's; one of larger pages keeps their numbers.
    """
    page = int(allocator.page_size)
    # A batch's frees are delayed until all of them are known.
    freed = [slots.to(torch.int64) for slots in allocator.free_group or ()]
    if page == 1:
        return torch.cat([allocator.get_all_free_pages().to(torch.int64), *freed])
    pages = [allocator.get_all_free_pages(), *allocator.free_page_ids_group]
    pages += [slots // page for slots in freed]
    return slots_of_pages(torch.unique(torch.cat(pages)), page)


def unwritten_slots(reqs: Iterable[Any], rows: torch.Tensor, page: int) -> list[torch.Tensor]:
    """Return the slots of requests' last pages that hold none of their tokens, but perhaps others'.

    Args:
        reqs: SGLang's requests; those that hold no KV have none.
        rows: ``[requests, positions]`` slots by request.
    """
    if page == 1:
        return []
    found = []
    for req in reqs:
        if not req.kv.holds_kv:
            continue
        held = int(req.kv.kv_allocated_len)
        if held % page:
            last = rows[req.kv.req_pool_idx, held - 1].to(torch.int64)
            more = torch.arange(1, page - held % page + 1, device=last.device)
            found.append(last + more)
    return found


def reserved_until(req: Any) -> int:
    """Return the length up to which a request holds slots for drafts; 0 if it has none to spare.

    Such a slot holds what was there before until the request writes to it, or gives it back.
    """
    kv = req.kv
    held = kv.holds_kv and kv.kv_allocated_len > kv.kv_committed_len
    return int(kv.kv_allocated_len) if held else 0
