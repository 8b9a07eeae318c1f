"""Sessions that workers share: in pieces, packed while idle, and outliving who wrote them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.builtin_specs import CASES
from support.clock import Clock
from support.hubs import hub, link
from support.sessions import after_turn, blank, chain_of, history, sessions, turn_change

from leyline_proxy.hub.sessions import HubSessions
from leyline_proxy.hub.shared_sessions import SharedSessions
from leyline_proxy.model.session import Session
from leyline_proxy.sessions.codec import decode_pieces, encode_head, encode_turn

CACHED = 1 << 20


def shared(clock: Clock | None = None, **options: Any) -> HubSessions:
    """Sessions of a hub."""
    bounds = {"max_sessions": 100, "max_bytes": 1 << 30, "ttl_s": 60.0, **options}
    return HubSessions(**bounds, clock=clock or Clock(0.0))


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(session=sessions(CASES))
def test_a_session_comes_back_from_its_pieces(session: Session) -> None:
    """Head and turns give the session again, and messages that turns share are one object."""
    found = decode_pieces(encode_head(session), [*map(encode_turn, session.turns)])
    assert found == replace(session, in_flight=frozenset())
    met: dict[int, set[int]] = {}
    for was, now in zip(session.turns, found.turns, strict=True):
        for before, after in zip(was.prepared.client, now.prepared.client, strict=True):
            met.setdefault(id(before), set()).add(id(after))
    assert all(len(objects) == 1 for objects in met.values())


@given(data=st.data())
def test_damaged_pieces_are_no_session(data: st.DataObject) -> None:
    """A changed byte gives None or another session, never an error."""
    session = after_turn(blank("a"), history(2, "a"))
    pieces = [encode_head(session), *map(encode_turn, session.turns)]
    at = data.draw(st.integers(0, len(pieces) - 1))
    place = data.draw(st.integers(0, len(pieces[at]) - 1))
    damaged = bytearray(pieces[at])
    damaged[place] ^= data.draw(st.integers(1, 255))
    pieces[at] = bytes(damaged)
    decode_pieces(pieces[0], pieces[1:])


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


async def test_only_a_new_turn_crosses_the_socket(tmp_path: Path) -> None:
    """A long session's next version costs what its newest turn costs, not the session."""
    sent: list[int] = []

    class Counted(HubSessions):
        def _replace(self, asked: Any) -> Any:
            sent.append(sum(map(len, asked.new.values())))
            return super()._replace(asked)

    counted = Counted(max_sessions=9, max_bytes=1 << 30, ttl_s=60.0)
    async with hub(tmp_path / "hub", counted), link(tmp_path / "hub") as one:
        store = SharedSessions(one, max_cached_bytes=CACHED)
        for turns in range(1, 7):
            await store.update("t", "a", turn_change("a", history(turns, "a")))
        session = await store.get("t", "a")
        assert session is not None
        assert sent[-1] == len(encode_turn(session.turns[-1]))
        await store.update("t", "a", lambda found: replace(found or session, updated=9.0))
        assert sent[-1] == 0


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
