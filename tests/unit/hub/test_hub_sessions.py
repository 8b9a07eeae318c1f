"""Sessions that workers share: in pieces, packed while idle, and outliving who wrote them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.builtin_specs import CASES
from support.clock import Clock
from support.hubs import hub, link
from support.sessions import after_turn, blank, chain_of, history, sessions, turn_change

from leyline_proxy.hub.sessions import HubSessions, Replace, SharedSessions
from leyline_proxy.model.session import Session
from leyline_proxy.sessions.pieces import Exchanged, read, write

CACHED = 1 << 20


def shared(clock: Clock | None = None, **options: Any) -> HubSessions:
    """Sessions of a hub."""
    bounds = {"max_sessions": 100, "max_bytes": 1 << 30, "ttl_s": 60.0, **options}
    return HubSessions(**bounds, clock=clock or Clock(0.0))


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(session=sessions(CASES))
def test_a_session_comes_back_from_its_pieces(session: Session) -> None:
    """It is equal, its fingerprints are known, and messages that turns share are one object."""
    pieces, _, _ = write(session, None, Exchanged(), count())
    taken = read(pieces)
    assert taken is not None
    found, numbers = taken
    assert found == replace(session, in_flight=frozenset())
    met: dict[int, set[int]] = {}
    for was, now in zip(session.turns, found.turns, strict=True):
        assert now.prepared.sent_fingerprints == was.prepared.sent_fingerprints
        for before, after in zip(was.prepared.messages, now.prepared.messages, strict=True):
            met.setdefault(id(before), set()).add(id(after))
    assert all(len(objects) == 1 for objects in met.values())
    # What was read is known: nothing of it is sent again.
    again, _, gone = write(found, found, numbers, count(1 << 40))
    assert not again.turns and not again.messages and not gone


@given(data=st.data())
def test_damaged_pieces_are_no_session(data: st.DataObject) -> None:
    """A changed byte gives None or another session, never an error."""
    whole, _, _ = write(after_turn(blank("a"), history(2, "a")), None, Exchanged(), count())
    kind = data.draw(st.sampled_from(["head", "turns", "messages"]))
    if kind == "head":
        read(replace(whole, head=damaged(whole.head, data)))
        return
    some = dict(getattr(whole, kind))
    number = data.draw(st.sampled_from(sorted(some)))
    some[number] = damaged(some[number], data)
    read(replace(whole, **{kind: some}))
    del some[number]
    assert read(replace(whole, **{kind: some})) is None


def damaged(piece: bytes, data: st.DataObject) -> bytes:
    """A piece with another byte."""
    changed = bytearray(piece)
    changed[data.draw(st.integers(0, len(piece) - 1))] ^= data.draw(st.integers(1, 255))
    return bytes(changed)


async def test_workers_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    """Each of many updates, by workers that both had read the session, finds the others'."""
    async with (
        hub(tmp_path / "hub", shared()),
        link(tmp_path / "hub") as one,
        link(tmp_path / "hub", 1) as two,
    ):
        stores = [SharedSessions(each, max_cached_bytes=CACHED) for each in (one, two)]
        messages = history(1, "a")
        await stores[0].update("t", "a", turn_change("a", messages), chain_of(messages))
        assert await stores[1].get("t", "a") is not None
        change = turn_change("a", messages)
        await asyncio.gather(*(each.update("t", "a", change) for each in stores * 10))
        found = [await each.get("t", "a") for each in stores]
    assert found[0] == found[1] and found[0] is not None
    assert [line.index for line in found[0].history] == list(range(21))


async def test_only_what_is_new_crosses_the_socket(tmp_path: Path) -> None:
    """A session's next version costs its newest turn and message, and old messages are dropped."""
    sent: list[Replace] = []

    class Counted(HubSessions):
        def _replace(self, asked: Replace) -> Any:
            sent.append(asked)
            return super()._replace(asked)

    counted = Counted(max_sessions=9, max_bytes=1 << 30, ttl_s=60.0)
    async with (
        hub(tmp_path / "hub", counted),
        link(tmp_path / "hub") as one,
        link(tmp_path / "hub", 1) as two,
    ):
        store = SharedSessions(one, max_cached_bytes=CACHED)
        messages = history(1, "a")
        for turns in range(1, 10):
            messages = [*messages, *history(1, f"task {turns}")[-2:]]
            await store.update("t", "a", turn_change("a", messages))
        assert {(len(each.new.turns), len(each.new.messages)) for each in sent[1:]} == {(1, 2)}
        for number in range(40):  # other histories under the same name
            other = history(2, f"other {number}")
            written = await store.update("t", "a", turn_change("a", other))
        gone = [number for each in sent for number in each.gone]
        assert gone and len(gone) == len(set(gone))
        assert await SharedSessions(two, max_cached_bytes=CACHED).get("t", "a") == written


async def test_an_idle_session_is_packed_and_continues(tmp_path: Path) -> None:
    """A packed session takes a tenth of the room, is read by another worker, and continues."""
    clock = Clock(0.0)
    sessions_ = shared(clock, idle_pack_s=30.0, ttl_s=1e6)
    async with (
        hub(tmp_path / "hub", sessions_),
        link(tmp_path / "hub") as one,
        link(tmp_path / "hub", 1) as two,
    ):
        first, second = (SharedSessions(each, max_cached_bytes=CACHED) for each in (one, two))
        for turns in range(1, 6):
            written = await first.update("t", "a", turn_change("a", history(8 * turns, "a")))
        before = sessions_.held_bytes
        await sessions_.pack_idle()
        assert sessions_.held_bytes == before
        clock.now += 31
        await sessions_.pack_idle()
        assert sessions_.held_bytes < before / 5
        assert await second.get("t", "a") == written
        clock.now += 31
        await sessions_.pack_idle()
        later = await first.update("t", "a", turn_change("a", history(41, "a")))
        assert await second.get("t", "a") == later


async def test_a_session_that_changes_while_it_is_packed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older version is packed beside the event loop; the newer one isn't lost by it."""
    clock = Clock(0.0)
    sessions_ = shared(clock, ttl_s=1e6)
    async with hub(tmp_path / "hub", sessions_), link(tmp_path / "hub") as one:
        store = SharedSessions(one, max_cached_bytes=CACHED)
        await store.update("t", "a", turn_change("a", history(1, "a")))

        async def meanwhile(work: Any, *given: Any) -> Any:
            done = work(*given)
            if work.__name__ == "pack":
                await store.update("t", "a", turn_change("a", history(2, "a")))
            return done

        monkeypatch.setattr(asyncio, "to_thread", meanwhile)
        clock.now += 31
        await sessions_.pack_idle()
        fresh = SharedSessions(one, max_cached_bytes=CACHED)
        found = await fresh.get("t", "a")
    assert found is not None and len(found.turns) == 2


async def test_a_search_at_another_worker_gives_the_whole_session(tmp_path: Path) -> None:
    """A worker that has never had the session finds it by its history, and reads it."""
    async with (
        hub(tmp_path / "hub", shared()),
        link(tmp_path / "hub") as one,
        link(tmp_path / "hub", 1) as two,
    ):
        first, second = (SharedSessions(each, max_cached_bytes=CACHED) for each in (one, two))
        messages = history(3, "a")
        for turns in range(1, 4):
            written = await first.update(
                "t", "a", turn_change("a", history(turns, "a")), chain_of(history(turns, "a"))
            )
        for _ in range(2):
            (match,) = await second.matches("t", "", chain_of(messages), 3)
            assert await second.get("t", match.session) == written
        # After another's update, a search doesn't make the old version pass for the new one.
        later = await first.update("t", "a", turn_change("a", messages), chain_of(messages))
        (match,) = await second.matches("t", "", chain_of(messages), 3)
        assert await second.get("t", match.session) == later


async def test_a_dead_workers_turn_stays_open(tmp_path: Path) -> None:
    """KV of a turn that a killed worker left is in no account, and the session says so."""
    async with hub(tmp_path / "hub", shared()), link(tmp_path / "hub", 1) as two:
        async with link(tmp_path / "hub") as one:
            dying = SharedSessions(one, max_cached_bytes=CACHED)
            await dying.update("t", "a", turn_change("a", history(1, "a")))
            await dying.open_turn("t", "a", "t7-left")
            await dying.open_turn("t", "a", "t8-ended")
            await dying.close_turn("t", "a", "t8-ended")
        found = await SharedSessions(two, max_cached_bytes=CACHED).get("t", "a")
    assert found is not None and found.in_flight == {"t7-left"}


@pytest.mark.parametrize("name", ["a\x00b", "é" * 50])
async def test_any_name_is_a_name(tmp_path: Path, name: str) -> None:
    """Names that clients choose can be anything that JSON can be."""
    async with hub(tmp_path / "hub", shared()), link(tmp_path / "hub") as one:
        store = SharedSessions(one, max_cached_bytes=CACHED)
        written = await store.update("t", name, turn_change(name, history(1, "a")))
        assert await store.get("t", name) == written
