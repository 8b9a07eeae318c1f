"""Runs of one task without a name: a session holds nothing but what its run has sent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from identify_kit import asked
from support.character_turns import turn_of

from leyline_proxy.model.session import Session
from leyline_proxy.request.identify import NAMED, Identity, Openings, identify
from leyline_proxy.sessions import MemorySessionStore

Messages = list[dict[str, Any]]
TENANT = "default"


def talk(rounds: int, name: str = "", alike: int = 99) -> Messages:
    """An agent's list after so many rounds; those from ``alike`` on are this run's own."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Fix it."}]
    for number in range(rounds):
        own = name if number >= alike else ""
        function = {"name": "ls", "arguments": "{}"}
        calls = [{"id": f"c{number}{own}", "type": "function", "function": function}]
        messages += [
            {"role": "assistant", "content": f"I look {number}{own}.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": f"c{number}{own}", "content": f"r{number}{own}"},
        ]
    return messages


class Proxy:
    """Sessions and turns under way, as a proxy has them."""

    def __init__(self) -> None:
        self.store = MemorySessionStore(max_sessions=100, ttl_s=1000, clock=self._tick)
        self.openings = Openings()
        self._now = 0.0

    def _tick(self) -> float:
        self._now += 0.001
        return self._now

    async def begin(self, messages: Messages, headers: dict[str, str] | None = None) -> Identity:
        """Identify a request; none of its session's turns may hold what the request doesn't."""
        request = asked(messages, headers)
        found = await identify(self.store, request, openings=self.openings)
        for turn in found.session.turns if found.session is not None else ():
            prints = turn.prepared.client_fingerprints
            assert request.fingerprints[: len(prints)] == prints
        return found

    async def settle(self, messages: Messages, found: Identity) -> None:
        """Retain a turn as one that was answered."""
        turn = turn_of(messages)

        def change(known: Session | None) -> Session:
            turns = (*(known.turns if known is not None else ()), turn)
            return Session(found.session_id, TENANT, found.key, turns, (), 0, 0.0)

        await self.store.update(TENANT, found.session_id, change, found.chain)
        self.openings.leave(found.hold)
        self.openings.leave(found.hold)  # as the connection's end does once more

    async def ask(self, messages: Messages) -> str:
        """A whole turn; its session."""
        found = await self.begin(messages)
        await self.settle(messages, found)
        return found.session_id


async def test_a_second_run_of_a_task_keeps_its_session() -> None:
    """It does so though the first run's list begins alike at every turn."""
    proxy = Proxy()
    first = [await proxy.ask(talk(rounds)) for rounds in range(7)]
    second = [await proxy.ask(talk(rounds)) for rounds in range(6)]
    assert len(set(first)) == len(set(second)) == 1
    assert not {*first} & {*second}
    # Where it is as long as the first was, either may be meant, and holds the same.
    assert await proxy.ask(talk(6)) in {*first, *second}


async def test_a_second_run_that_makes_two_answers_at_a_time_keeps_its_session() -> None:
    """The length of a step alone doesn't identify it: the other run doesn't continue as this one
    does."""
    proxy = Proxy()
    for rounds in range(7):
        await proxy.ask(talk(rounds))
    second = [await proxy.ask(talk(rounds)) for rounds in (0, 2, 4)]
    assert len(set(second)) == 1


async def test_an_edited_run_is_found_beside_another_that_broke_off() -> None:
    """One that was given up after its first turn doesn't take it over."""
    proxy = Proxy()
    sessions = {await proxy.ask(talk(rounds)) for rounds in range(4)}
    await proxy.ask(talk(0))
    edited = talk(5)
    edited[5] = {**edited[5], "content": "cut"}
    found = await identify(proxy.store, asked(edited), openings=proxy.openings)
    assert {found.session_id} == sessions


async def test_two_turns_under_way_are_of_one_session_only_if_they_are_the_same() -> None:
    """A retried request stays; another that continues the same turn gets a session of its own,
    until the first is settled and its own history decides."""
    proxy = Proxy()
    session = await proxy.ask(talk(1))
    left, right = talk(2, "left", 1), talk(2, "right", 1)
    first, retried = await proxy.begin(left), await proxy.begin(left)
    other = await proxy.begin(right)
    assert first.session_id == retried.session_id == session != other.session_id
    await proxy.settle(left, first)
    # The retried one would put its shorter list after its own continuation.
    ahead = await proxy.begin(talk(3, "left", 1))
    assert ahead.session_id != session
    for messages, found in ((left, retried), (right, other), (talk(3, "left", 1), ahead)):
        await proxy.settle(messages, found)
    assert not len(proxy.openings)
    assert await proxy.ask([*left, {"role": "user", "content": "more"}]) == session
    assert await proxy.ask([*right, {"role": "user", "content": "more"}]) == other.session_id


@given(
    alike=st.integers(0, 3),
    steps=st.lists(st.sampled_from("AABBX"), min_size=4, max_size=24),
)
def test_runs_under_way_at_once_never_mix(alike: int, steps: list[str]) -> None:
    """No session holds a turn that isn't the run's own, in any order in which two runs of a task
    send and get their turns, and whoever repeats what was sent before them."""

    async def play() -> None:
        proxy = Proxy()
        sent = {"A": 0, "B": 0, "X": 0}
        waiting: dict[str, tuple[Messages, Identity]] = {}
        for who in steps:
            if who in waiting:
                await proxy.settle(*waiting.pop(who))
                continue
            messages = talk(sent[who] % 6, who, alike)
            waiting[who] = messages, await proxy.begin(messages)
            sent[who] += 1
        for turn in waiting.values():
            await proxy.settle(*turn)
        assert not len(proxy.openings)

    asyncio.run(play())


@pytest.mark.parametrize(
    ("headers", "members", "found", "trust"),
    [
        ({"x-leyline-session": "mine"}, {}, "header", "name"),
        ({"x-session-id": "run"}, {}, "name", "opening"),
        ({}, {"metadata": {"session_id": "run"}}, "name", "opening"),
        ({}, {"prompt_cache_key": "shared"}, "history", "messages"),
        ({}, {"user": "me"}, "history", "messages"),
        ({}, {}, "history", "messages"),
    ],
)
async def test_a_session_is_certain_by_its_name_alone(
    headers: dict[str, str], members: dict[str, Any], found: str, trust: str
) -> None:
    """The name is the caller's own, or a harness's, which is given to several conversations; a key
    that users share doesn't count, nor does the messages' content, now or when the session
    continues."""
    proxy = Proxy()
    for rounds in (1, 2):
        request = asked(talk(rounds), headers, **members)
        identity = await identify(proxy.store, request, openings=proxy.openings)
        assert (identity.found, identity.trust) == (found, trust)
        await proxy.settle(talk(rounds), identity)


async def test_what_lies_beside_a_name_is_not_certain() -> None:
    """Another conversation of the name is recognised by likeness, at first and later."""
    proxy, name = Proxy(), {"x-session-id": "run"}
    title = [{"role": "user", "content": "Give a title."}]
    await proxy.settle(title, await proxy.begin(title, name))
    found = await proxy.begin(talk(1), name)
    assert (found.found, found.trust) == ("likeness", "messages")
    await proxy.settle(talk(1), found)
    appended, dated = talk(2), talk(2)
    dated[0] = {"role": "system", "content": "Another day."}
    for messages, how in ((appended, "history"), (dated, "likeness")):
        identity = await identify(proxy.store, asked(messages, name), openings=proxy.openings)
        assert (identity.session_id, identity.found) == (found.session_id, how)
        assert identity.trust == "messages"
        proxy.openings.leave(identity.hold)
    named = await proxy.begin(appended, {"x-leyline-session": found.session_id})
    await proxy.settle(appended, named)
    assert (await proxy.begin(dated, name)).session_id != found.session_id, "it may remember more"


async def test_a_name_that_comes_later_is_certain_from_the_next_turn_on() -> None:
    """A client may send the id that it was given: what was retained before may be another's."""
    proxy = Proxy()
    session = await proxy.ask(talk(1))
    named = await proxy.begin(talk(2), {"x-leyline-session": session})
    assert (named.found, named.trust) == ("header", "messages")
    known = await proxy.store.get(TENANT, session)
    assert known is not None and known.key != NAMED
