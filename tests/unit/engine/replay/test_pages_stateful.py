"""The replay engine over larger pages: its tree, random sessions, and readers of a secret."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from taint_machine import TaintMachine
from test_engine_stateful import EngineMachine

from leyline_replay.cache.radix import RadixTree
from leyline_replay.factory import read_page

KEYS = st.lists(st.integers(0, 1), max_size=24)
STEPS = st.lists(
    st.tuples(st.sampled_from(["insert", "match", "peek", "evict"]), KEYS, st.integers(0, 24)),
    max_size=30,
)


def pages_of(keys: list[int], page: int) -> array[int]:
    """Each whole page of keys as one key."""
    whole = len(keys) // page * page
    groups = [keys[at : at + page] for at in range(0, whole, page)]
    return array("q", [int("".join(map(str, group)), 2) for group in groups])


@given(page=st.sampled_from([2, 3, 4]), steps=STEPS)
def test_a_tree_of_pages_is_a_tree_whose_keys_are_pages(
    page: int, steps: list[tuple[str, list[int], int]]
) -> None:
    """Whatever is inserted, looked up and evicted, both find and hold the same."""
    paged, plain = RadixTree(page), RadixTree()
    slot = 0
    for what, keys, number in steps:
        tokens, pages = array("q", keys), pages_of(keys, page)
        if what == "insert" and keys:
            slots = np.arange(slot, slot + len(keys), dtype=np.int64)
            slot += len(keys)
            present, match = paged.insert(tokens, slots, "a")
            there, same = plain.insert(pages, slots[: len(pages) * page : page], "a")
            assert (present, match.length) == (there * page, same.length * page)
            assert match.slots[::page].tolist() == same.slots.tolist()
        elif what == "match":
            match, same = paged.match(tokens, number), plain.match(pages, number // page)
            assert match.length == same.length * page
            assert match.slots[::page].tolist() == same.slots.tolist()
        elif what == "peek":
            found, also = paged.peek(tokens, number), plain.peek(pages, number // page)
            assert found[::page].tolist() == also.tolist()
        elif what == "evict":
            gone, went = paged.evict(number), plain.evict(-(-number // page))
            assert sorted(gone.tolist())[::page] == sorted(went.tolist())
        assert paged.cached_count() == plain.cached_count() * page
        assert all(len(node.keys) % page == 0 for node in paged.nodes())


@pytest.mark.parametrize(("at", "kept"), [(3, 0), (4, 4), (6, 4), (8, 8)])
def test_a_split_inside_a_page_takes_the_page_along(at: int, kept: int) -> None:
    """A forget from inside a page on removes it whole."""
    tree = RadixTree(4)
    tree.insert(array("q", range(8)), np.arange(8), "a")
    (node,) = tree.nodes()
    head, rest = tree.split(node, at)
    lengths = [len(part.keys) if part is not None else 0 for part in (head, rest)]
    assert lengths == [kept, 8 - kept]


def test_other_page_sizes_are_refused_by_name() -> None:
    """An engine's option outside the tested sizes is an error that names them."""
    assert read_page(64) == 64
    with pytest.raises(ValueError, match=r"page_tokens can't be 8; choose one of 1, 16, 32"):
        read_page(8)


class PagedEngine(EngineMachine):
    """The same over pages of 4 tokens, so that short sequences have many."""

    page = 4


class PagedTaint(TaintMachine):
    """The same over pages of 8 tokens."""

    page = 8


TestPagedEngine = PagedEngine.TestCase
TestPagedEngine.settings = settings(
    max_examples=examples(15), stateful_step_count=30, deadline=None
)
TestPagedTaint = PagedTaint.TestCase
TestPagedTaint.settings = settings(max_examples=examples(12), stateful_step_count=30, deadline=None)
