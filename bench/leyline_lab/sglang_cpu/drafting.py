"""Speculative decoding on a CPU: in plain PyTorch what SGLang's compiled kernels do there.

SGLang's own CPU engine calls ``sgl_kernel``, whose pip package has none of it for a CPU. The
functions here have its names' arguments, and are put in its place. Like that engine, they take
the most likely token always: a request's temperature has no effect.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_OPS = "sglang.kernels.ops"
_ON_CPU = (
    "sglang.srt.speculative.eagle_utils",
    "sglang.srt.speculative.eagle_worker_common",
    "sglang.srt.speculative.eagle_worker_v2",
    "sglang.srt.speculative.ngram_worker",
)
"""SGLang's modules that decide by a variable whether they run on a CPU."""


def register_drafting() -> None:
    """Let SGLang's speculative decoding run in this scheduler process."""
    _import_tree_reconstruction()
    # Rows are then moved in plain PyTorch, and what is warmed up for that isn't used.
    os.environ.setdefault("SGLANG_NATIVE_MOVE_KV_CACHE", "1")
    for name, functions in _REPLACED.items():
        module: Any = import_module(name)
        module._is_cpu = True
        for function, replacement in functions.items():
            setattr(module, function, replacement)
    # DeepSeek's draft shares the model's head, and waits for a GPU then.
    torch.cuda.synchronize = _nothing_to_wait_for
    for name in _ON_CPU:
        worker: Any = import_module(name)
        worker._is_cpu = True
    _register_backends()


def _nothing_to_wait_for(device: object = None) -> None:
    """Return at once: this platform runs only where there is no GPU."""


def _import_tree_reconstruction() -> None:
    """Import the one module that needs ``sgl_kernel`` to be imported; others look whether it is
    there."""
    names = ("sgl_kernel", "sgl_kernel.speculative")
    stand_ins = {name: ModuleType(name) for name in names if name not in sys.modules}
    for stand_in in stand_ins.values():
        stand_in.reconstruct_indices_from_tree_mask = read_tree  # type: ignore[attr-defined]
    sys.modules.update(stand_ins)
    try:
        import_module(f"{_OPS}.speculative.reconstruct_tree")
    finally:
        for name in stand_ins:
            del sys.modules[name]


def _register_backends() -> None:
    """Let a draft model attend: its extension as any, its decoding one step further each."""
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    from leyline_lab.sglang_cpu.backend import CpuDraftBackends

    def decoding(self: Any) -> CpuDraftBackends | None:
        steps = self.speculative_num_steps
        return CpuDraftBackends(self.draft_model_runner, steps, self.topk) if steps > 1 else None

    DraftBackendFactory.create_decode_backend = decoding
    # None leaves it with the back end that its runner has.
    DraftBackendFactory.create_draft_extend_backend = lambda _: None


def draft_slots(  # noqa: PLR0917 - as SGLang calls it
    requests: Tensor,
    rows: Tensor,
    lengths: Tensor,
    out: Tensor,
    _width: int,
    topk: int,
    columns: int,
) -> None:
    """Write each request's ``topk * columns`` slots from its length on to ``out``."""
    count = topk * columns
    places = lengths[:, None] + torch.arange(count, device=lengths.device)
    out.copy_(rows[requests[:, None], places].reshape(-1))


def extend_slots(
    requests: Tensor, rows: Tensor, starts: Tensor, ends: Tensor, out: Tensor, _width: int
) -> None:
    """Write each request's slots from its start to its end to ``out``, one after the other."""
    found = [
        rows[request, start:end]
        for request, start, end in zip(
            requests.tolist(), starts.tolist(), ends.tolist(), strict=True
        )
    ]
    slots = torch.cat(found)
    out[: len(slots)].copy_(slots)


def write_slots(
    requests: Tensor, rows: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, _width: int
) -> None:
    """Write slots, one request's after the other's, to each request's row from its start on."""
    done = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        rows[request, start:end] = slots[done : done + end - start].to(rows.dtype)
        done += end - start


def last_accepted(accepted: Tensor, counts: Tensor, out: Tensor, stride: int) -> None:
    """Write the last accepted token of each request's ``stride`` to ``out``."""
    firsts = torch.arange(len(counts), device=counts.device) * stride
    out.copy_(accepted.reshape(-1)[firsts + counts - 1])


def accepted_slots(accept_index: Tensor, slots: Tensor, out: Tensor) -> None:
    """Write the slots of accepted nodes to the beginning of ``out``."""
    flat = accept_index.reshape(-1)
    chosen = slots[flat[flat > -1].long()]
    out[: len(chosen)].copy_(chosen)


def build_tree(  # noqa: PLR0917
    parent_list: Tensor,
    selected: Tensor,
    lengths: Tensor,
    mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    topk: int,
    _depth: int,
    nodes: int,
    _mode: int,
) -> None:
    """Write a draft tree's ancestors, places and links; node 0 is the last accepted token.

    Args:
        parent_list: ``[batch, ...]`` candidates from which others were drafted.
        selected: ``[batch, nodes - 1]`` candidates that were chosen, in order.
        mask: bool, ``[batch * nodes * nodes]``: which nodes a node sees.
    """
    batch = len(lengths)
    seen = mask.view(batch, nodes, nodes)
    seen.zero_()
    retrieve_index.copy_(torch.arange(batch * nodes, device=mask.device).view(batch, nodes))
    for row in range(batch):
        chosen, parents = selected[row].tolist(), parent_list[row].tolist()
        above = [_parent(candidate, chosen, parents, topk) for candidate in chosen]
        _link(next_token[row], next_sibling[row], above)
        for node in range(nodes):
            place = node
            seen[row, node, 0] = True
            while place:
                seen[row, node, place] = True
                place = above[place - 1]
    depths = seen.sum(-1) - 1
    positions.copy_((lengths[:, None] + depths).reshape(-1))


def _parent(candidate: int, chosen: list[int], parents: list[int], topk: int) -> int:
    step = candidate // topk
    return 0 if step == 0 else chosen.index(parents[step]) + 1


def _link(next_token: Tensor, next_sibling: Tensor, above: list[int]) -> None:
    """Link each node to its first child, and to the next child of its parent."""
    for node in range(len(above), 0, -1):
        parent = above[node - 1]
        next_sibling[node] = next_token[parent]
        next_token[parent] = node


def verify_greedy(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Follow each tree as long as it has the token that the model would have chosen.

    Args:
        predicts: ``[batch * nodes]``, written: the model's token after each accepted node.
        accept_index: ``[batch, depth]``, written: accepted nodes of the whole batch; -1 after them.
        accept_token_num: ``[batch]``, written: accepted nodes without the first.
        candidates: ``[batch, nodes]`` tokens.
        target_predict: ``[batch, nodes]`` the model's choices after each node.
    """
    for row in range(len(candidates)):
        node, count = 0, 0
        accept_index[row, 0] = retrive_index[row, 0]
        while True:
            wanted = int(target_predict[row, node])
            predicts[int(retrive_index[row, node])] = wanted
            if count + 1 == accept_index.shape[1]:
                break
            child = int(retrive_next_token[row, node])
            while child >= 0 and int(candidates[row, child]) != wanted:
                child = int(retrive_next_sibling[row, child])
            if child < 0:
                break
            node, count = child, count + 1
            accept_index[row, count] = retrive_index[row, node]
        accept_token_num[row] = count


def read_tree(  # noqa: PLR0917
    mask: Tensor,
    lengths: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    batch: int,
    nodes: int,
) -> None:
    """Write the places and links of trees that are given by their masks alone."""
    seen = mask.view(batch, nodes, nodes).bool()
    earlier = torch.tril(seen, diagonal=-1)
    positions.copy_((earlier.sum(-1) + lengths[:, None]).reshape(-1))
    retrieve_index.copy_(torch.arange(batch * nodes, device=mask.device).view(batch, nodes))
    next_token.fill_(-1)
    next_sibling.fill_(-1)
    for row in range(batch):
        above = [max(tree.nonzero().flatten().tolist(), default=-1) for tree in earlier[row]]
        for node in range(nodes - 1, -1, -1):
            parent = above[node]
            if parent >= 0:
                next_sibling[row, node] = next_token[row, parent]
                next_token[row, parent] = node


_REPLACED: Mapping[str, Mapping[str, Callable[..., None]]] = {
    f"{_OPS}.kvcache.cache_move": {"copy_all_layer_kv_cache_cpu": lambda *_: None},
    f"{_OPS}.speculative.spec_tree": {
        "sgl_build_tree_kernel_efficient_cpu": build_tree,
        "sgl_verify_tree_greedy_cpu": verify_greedy,
    },
    f"{_OPS}.speculative.cache_locs": {
        "assign_draft_cache_locs_contiguous_cpu": draft_slots,
        "assign_extend_cache_locs_cpu": extend_slots,
    },
    f"{_OPS}.speculative.eagle": {
        "fill_bonus_tokens_cpu": last_accepted,
        "fill_accept_out_cache_loc_cpu": accepted_slots,
    },
    "sglang.srt.mem_cache.allocation": {"assign_req_to_token_pool_cpu": write_slots},
}
"""What SGLang imports from ``sgl_kernel`` on a CPU, by the module that does."""
