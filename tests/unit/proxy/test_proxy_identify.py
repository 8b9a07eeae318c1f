"""Which session a request belongs to."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest

from leyline_proxy.core.naming import name_spans
from leyline_proxy.core.prepare import prepare
from leyline_proxy.core.rendered import Rendered
from leyline_proxy.core.session import Departed, RetainedTurn, Session
from leyline_proxy.pipeline.identify import Identity, identify, public_id
from leyline_proxy.pipeline.request import parse_chat
from leyline_proxy.sessions import MemorySessionStore
from leyline_proxy.settings import Settings
from leyline_proxy.tenants import build_directory

SYSTEM = {"role": "system", "content": "Be brief."}
TASK = {"role": "user", "content": "Fix it."}
ANSWER = {"role": "assistant", "content": "Done."}
LATER = {"role": "assistant", "content": "Later."}
AGAIN = {"role": "user", "content": "Again."}


@pytest.fixture
def store() -> MemorySessionStore:
    """An empty store."""
    return MemorySessionStore(max_sessions=10, ttl_s=100)


async def seen(
    store: MemorySessionStore,
    messages: list[dict[str, Any]],
    headers: dict[str, str] | None = None,
    **members: Any,
) -> Identity:
    """Identify a request, and keep its session as an answered turn would."""
    tenant = build_directory(Settings()).authenticate({})
    raw = json.dumps({"model": "m", "messages": messages, **members}).encode()
    found = await identify(store, parse_chat(raw, headers or {}, tenant, arrived=0.0))

    prepared = prepare(messages, [], [], 0)
    rendered = Rendered(array("q"), ())
    names = name_spans("t", prepared, [], Departed(), rendered)
    turn = RetainedTurn("t", 0, prepared, rendered, (), (), None, "", "m", names=names)

    def change(session: Session | None) -> Session:
        return Session(found.session_id, tenant.name, found.key, (turn,), (), 0, 0.0)

    await store.update(tenant.name, found.session_id, change, found.chain)
    return found


async def test_a_named_session_is_that_session(store: MemorySessionStore) -> None:
    """A name in a header holds, whatever the messages."""
    first = await seen(store, [TASK], {"x-leyline-session": "mine"})
    second = await seen(store, [AGAIN], {"x-leyline-session": "mine"})
    assert first.session_id == second.session_id == "mine"
    assert second.session is not None


async def test_a_conversation_is_continued_and_edited(store: MemorySessionStore) -> None:
    """Longer histories continue it, edited ones too where task and first answer are the same."""
    first = await seen(store, [SYSTEM, TASK])
    second = await seen(store, [SYSTEM, TASK, ANSWER, AGAIN])
    await seen(store, [SYSTEM, TASK, ANSWER, AGAIN, LATER, TASK])
    edited = await seen(store, [SYSTEM, TASK, ANSWER, {**AGAIN, "content": "…"}, LATER, TASK])
    assert first.session_id == second.session_id == edited.session_id


async def test_conversations_that_open_alike_stay_apart(store: MemorySessionStore) -> None:
    """Two users with one opening and, by chance, one first answer each go on with their own."""
    first = await seen(store, [SYSTEM, TASK])
    second = await seen(store, [SYSTEM, TASK])
    assert first.session_id != second.session_id
    mine = {"role": "user", "content": "mine"}
    ahead = await seen(store, [SYSTEM, TASK, ANSWER, AGAIN])
    behind = await seen(store, [SYSTEM, TASK, ANSWER, mine])
    assert {ahead.session_id, behind.session_id} == {first.session_id, second.session_id}
    stranger = await seen(store, [SYSTEM, TASK, {**ANSWER, "content": "Other."}, AGAIN])
    assert stranger.session_id not in {first.session_id, second.session_id}


async def test_a_new_conversation_is_a_new_session(store: MemorySessionStore) -> None:
    """The same opening without an answer, and another task, are other conversations."""
    first = await seen(store, [SYSTEM, TASK])
    await seen(store, [SYSTEM, TASK, ANSWER, AGAIN])
    restarted = await seen(store, [SYSTEM, TASK])
    other = await seen(store, [SYSTEM, AGAIN, ANSWER, TASK])
    assert len({first.session_id, restarted.session_id, other.session_id}) == 3


async def test_a_user_may_have_several_conversations(store: MemorySessionStore) -> None:
    """Names that conversations share narrow the search; the history still decides."""
    first = await seen(store, [SYSTEM, TASK], user="u1")
    other_task = await seen(store, [SYSTEM, AGAIN], user="u1")
    other_user = await seen(store, [SYSTEM, TASK, ANSWER], user="u2")
    same = await seen(store, [SYSTEM, TASK, ANSWER], user="u1")
    assert same.session_id == first.session_id
    assert len({first.session_id, other_task.session_id, other_user.session_id}) == 3


def test_public_ids_are_plain() -> None:
    """Names fit for a URL stay; others become a digest, the same one each time."""
    assert public_id("run-7:a.b@c_d") == "run-7:a.b@c_d"
    assert public_id("a/b") == public_id("a/b") != public_id("a b")
    assert "/" not in public_id("a/b")
    assert public_id("a/b", "key") == public_id("a/b", "key") != public_id("a/b")
    assert public_id("run-7", "key") == "run-7"
