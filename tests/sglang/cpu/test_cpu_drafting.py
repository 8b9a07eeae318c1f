"""The plain versions of SGLang's kernels for drafts: trees, their links, and what is accepted."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from leyline_lab.sglang_cpu.attention import Scoring, attend_batch
from leyline_lab.sglang_cpu.backend import branch_slots
from leyline_lab.sglang_cpu.drafting import (
    accepted_slots,
    build_tree,
    draft_slots,
    extend_slots,
    last_accepted,
    read_tree,
    verify_greedy,
    write_slots,
)

parents = st.lists(st.integers(0, 30), min_size=1, max_size=7).map(
    lambda drawn: [0, *(value % (at + 1) for at, value in enumerate(drawn))]
)
"""The parent of each node, the root's own being itself; a parent comes before its children."""


def mask_of(above: list[int]) -> torch.Tensor:
    """bool ``[nodes, nodes]``: each node sees itself and its ancestors."""
    mask = torch.zeros(len(above), len(above), dtype=torch.bool)
    for node, parent in enumerate(above):
        mask[node] = mask[parent]
        mask[node, node] = True
    return mask


class Links:
    """The outputs of a tree's reading."""

    def __init__(self, batch: int, nodes: int) -> None:
        self.positions = torch.full((batch * nodes,), -7)
        self.index, self.child, self.sibling = torch.full((3, batch, nodes), -1).unbind()

    def children(self, row: int, node: int) -> list[int]:
        """The children of a node, by the links."""
        found, child = [], int(self.child[row, node])
        while child >= 0:
            found.append(child)
            child = int(self.sibling[row, child])
        return found


def read(trees: list[list[int]], lengths: list[int]) -> Links:
    nodes = len(trees[0])
    links = Links(len(trees), nodes)
    mask = torch.stack([mask_of(tree) for tree in trees]).flatten()
    read_tree(
        mask,
        torch.tensor(lengths),
        links.positions,
        links.index,
        links.child,
        links.sibling,
        len(trees),
        nodes,
    )
    return links


@given(above=parents)
def test_a_tree_is_read_from_its_mask(above: list[int]) -> None:
    """Links give each node's children in order, and places are depths after the sequence."""
    links = read([above, above], [10, 20])
    for row, length in enumerate((10, 20)):
        for node in range(len(above)):
            wanted = [child for child, parent in enumerate(above) if parent == node and child]
            assert links.children(row, node) == wanted
            depth = int(mask_of(above)[node].sum()) - 1
            assert int(links.positions[row * len(above) + node]) == length + depth
    assert links.index.flatten().tolist() == list(range(2 * len(above)))


def test_a_drafted_tree_is_that_of_its_candidates() -> None:
    """Two steps of two candidates each: the mask, the places and the links are the tree's.

    Candidates 0 and 1 follow the root; 2 and 3 were drafted from candidate 0, 4 and 5 from 1.
    """
    links, nodes = Links(1, 5), 5
    mask = torch.ones(nodes * nodes, dtype=torch.bool)
    build_tree(
        torch.tensor([[-1, 0, 1]]),
        torch.tensor([[0, 1, 2, 5]]),
        torch.tensor([7]),
        mask,
        links.positions,
        links.index,
        links.child,
        links.sibling,
        2,
        2,
        nodes,
        1,
    )
    assert torch.equal(mask.view(nodes, nodes), mask_of([0, 0, 0, 1, 2]))
    assert links.positions.tolist() == [7, 8, 8, 9, 9]
    assert [links.children(0, node) for node in range(nodes)] == [[1, 2], [3], [4], [], []]


@given(above=parents, data=st.data())
def test_drafts_are_accepted_as_long_as_the_model_agrees(
    above: list[int], data: st.DataObject
) -> None:
    """The accepted nodes are the path that the model's own choices take, and one token more."""
    nodes, depth = len(above), data.draw(st.integers(1, len(above)))
    tokens = data.draw(st.lists(st.integers(0, 3), min_size=nodes, max_size=nodes))
    choices = data.draw(st.lists(st.integers(0, 3), min_size=nodes, max_size=nodes))
    links = read([above], [5])
    predicts, counts = torch.zeros(nodes, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    accepted = torch.full((1, depth), -1)
    verify_greedy(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=counts,
        candidates=torch.tensor([tokens]),
        retrive_index=links.index,
        retrive_next_token=links.child,
        retrive_next_sibling=links.sibling,
        target_predict=torch.tensor([choices]),
    )
    path = [0]
    while len(path) < depth:
        fitting = [n for n in links.children(0, path[-1]) if tokens[n] == choices[path[-1]]]
        if not fitting:
            break
        path.append(fitting[0])
    assert int(counts[0]) == len(path) - 1
    assert accepted[0].tolist() == path + [-1] * (depth - len(path))
    assert [int(predicts[node]) for node in path] == [choices[node] for node in path]


def test_slots_are_those_of_the_requests_rows() -> None:
    """Slots after each request's length are read from its row, and written to it."""
    rows = torch.arange(40).view(4, 10)
    requests, lengths = torch.tensor([2, 1]), torch.tensor([3, 5])
    out = torch.zeros(4, dtype=torch.int64)
    draft_slots(requests, rows, lengths, out, 10, 1, 2)
    assert out.tolist() == [23, 24, 15, 16]
    out = torch.zeros(5, dtype=torch.int64)
    extend_slots(requests, rows, lengths, torch.tensor([5, 6]), out, 10)
    assert out.tolist() == [23, 24, 15, 0, 0]
    write_slots(requests, rows, lengths, torch.tensor([5, 6]), torch.tensor([90, 91, 92]), 10)
    assert rows[2, 3:5].tolist() == [90, 91] and int(rows[1, 5]) == 92
    last = torch.zeros(2, dtype=torch.int64)
    last_accepted(torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([2, 1]), last, 3)
    assert last.tolist() == [2, 4]
    out = torch.zeros(4, dtype=torch.int64)
    accepted_slots(torch.tensor([[0, 2], [3, -1]]), torch.tensor([7, 8, 9, 10]), out)
    assert out.tolist() == [7, 9, 10, 0]


def test_a_branch_reads_the_sequence_and_its_own_drafts() -> None:
    """Slots of a request are its tokens', then each branch's; branches follow one another."""
    rows = [torch.arange(10, 19), torch.arange(50, 58)]
    found = branch_slots(rows, topk=2, steps=3, drafted=2)
    assert [slots.tolist() for slots in found] == [
        [10, 11, 12, 13, 14],
        [10, 11, 12, 16, 17],
        [50, 51, 52, 53],
        [50, 51, 55, 56],
    ]


def test_drafts_of_a_tree_attend_to_their_ancestors_alone() -> None:
    """Attention under a tree's mask is that of each path alone, in a sequence of its own."""
    generator = torch.Generator().manual_seed(3)
    query, keys, values = (torch.randn(12, 2, 8, generator=generator) for _ in range(3))
    above, before = [0, 0, 0, 1], 8
    together = torch.empty(4, 2, 8)
    slots = torch.arange(12)
    options = {"new_tokens": [4], "scoring": Scoring(0.3)}
    attend_batch(
        query[8:], together, keys, values, slots=[slots], seen=mask_of(above)[None], **options
    )
    causal = torch.empty(4, 2, 8)
    attend_batch(query[8:], causal, keys, values, slots=[slots], **options)
    for node in range(4):
        path = torch.nonzero(mask_of(above)[node]).flatten() + before
        alone = torch.empty(len(path), 2, 8)
        own = torch.cat([slots[:before], path])
        attend_batch(
            query[path],
            alone,
            keys,
            values,
            slots=[own],
            new_tokens=[len(path)],
            scoring=Scoring(0.3),
        )
        assert torch.allclose(together[node], alone[-1], atol=1e-6)
    assert not torch.allclose(together, causal, atol=1e-3), "control"
