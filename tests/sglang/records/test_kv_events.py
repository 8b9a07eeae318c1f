"""KV events of spliced blocks: no router takes them for somebody else's prompt."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_kit import Scheduler, sealed, source_of, text
from sglang.srt.disaggregation.kv_events import (
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVEventBatch,
)
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from leyline_engine.contract import (
    PRIVATE_ID,
    Directive,
    EditPayload,
    LineageRun,
    SourceRef,
    apply_directives,
)
from leyline_engine.records.lineage import fold_keys
from leyline_engine.sglang.radix import private_ids

pytestmark = pytest.mark.usefixtures("server_args")

CUT = Directive(40, 60)


def spliced(scheduler: Scheduler, session: str = "s", cut: Directive = CUT) -> list[int]:
    """The prompt of a turn that was spliced."""
    told, _ = scheduler.serve(
        text(120, 1), EditPayload(session=session, scope="t", turn=f"{session}1")
    )
    payload = EditPayload(
        session=session,
        scope="t",
        turn=f"{session}2",
        sources=(SourceRef(f"{session}1", len(source_of(told)), sealed(told)),),
        directives=(cut,),
    )
    prompt = [*apply_directives(source_of(told), [cut]), 9, 8]
    _, record = scheduler.serve(prompt, payload)
    assert record is not None and record.receipt.tokens.spliced
    return prompt


def hashes_of(events: list[BlockStored]) -> set[int]:
    """The hashes of all blocks of events, of which SGLang joins those in a row."""
    return {key for event in events for key in event.block_hashes}


def stored(events: list[Any]) -> list[BlockStored]:
    return [event for event in events if isinstance(event, BlockStored)]


@pytest.mark.parametrize("core", ["rust", pytest.param("python", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("page", [1, 4])
def test_spliced_blocks_are_announced_under_their_lineage(core: str, page: int) -> None:
    """Blocks in front of the splice have their tokens; those after it have private ids and a mark,
    and their hashes aren't those of the same tokens without it."""
    scheduler = Scheduler(core=core, events=True, page=page)
    prompt = spliced(scheduler)
    events = stored(scheduler.cache.take_events())
    private = [event for event in events if getattr(event, "lineage", None)]
    exact = [event for event in events if event not in private]
    assert private and exact
    assert all(max(event.token_ids) < PRIVATE_ID for event in exact)
    for event in private:
        assert all(token < 2**31 for token in event.token_ids)
        assert max(event.token_ids) >= PRIVATE_ID
    assert len({event.lineage for event in private}) == 1
    scheduler.serve(prompt)  # a stranger with the same tokens
    strangers = stored(scheduler.cache.take_events())
    assert strangers, "a stranger found the spliced blocks"
    assert not hashes_of(strangers) & hashes_of(private)
    assert all(getattr(event, "lineage", None) is None for event in strangers)


def test_two_edits_with_equal_tokens_are_two_lineages() -> None:
    """Neither their ids nor their hashes meet, though the prompts are alike."""
    scheduler = Scheduler(events=True)
    hashes, marks, ids = [], [], []
    for session in ("one", "two"):
        spliced(scheduler, session)
        private = [e for e in stored(scheduler.cache.take_events()) if getattr(e, "lineage", None)]
        hashes.append(hashes_of(private))
        marks.append({event.lineage for event in private})
        ids.append({token for event in private for token in event.token_ids})
    assert not hashes[0] & hashes[1]
    assert not marks[0] & marks[1]
    assert not ids[0] & ids[1]


def test_a_block_is_removed_by_the_hash_under_which_it_was_stored() -> None:
    """A router's index loses spliced blocks when the engine does."""
    scheduler = Scheduler(events=True)
    spliced(scheduler)
    announced = hashes_of(stored(scheduler.cache.take_events()))
    scheduler.cache.evict(EvictParams(num_tokens=2000))
    gone = {
        key
        for event in scheduler.cache.take_events()
        if isinstance(event, BlockRemoved)
        for key in event.block_hashes
    }
    assert announced == gone


def test_readers_that_know_nothing_of_lineages_read_the_events() -> None:
    """The encoding is SGLang's, with one more member."""
    scheduler = Scheduler(events=True)
    spliced(scheduler)
    batch = EventBatch(ts=0.0, events=scheduler.cache.take_events())
    raw = msgspec.msgpack.encode(batch)
    read = msgspec.msgpack.decode(raw, type=KVEventBatch)
    assert len(read.events) == len(batch.events)
    np.array([token for event in stored(read.events) for token in event.token_ids], dtype=np.int32)


@given(
    st.lists(st.integers(0, 2**24 - 1), min_size=1, max_size=20),
    st.sampled_from(["a", "b"]),
    st.integers(0, 20),
)
def test_private_ids_keep_plain_tokens_and_never_equal_one(
    tokens: list[int], lineage: str, start: int
) -> None:
    """Keys in front of a lineage stay; those under it are numbers of 31 bits with the flag."""
    ids = private_ids(fold_keys(tokens, [LineageRun(start, lineage)], "t"))
    assert ids[:start] == tokens[:start]
    assert all(PRIVATE_ID <= each < 2 * PRIVATE_ID for each in ids[start:])
