"""The session to which a request belongs."""

from __future__ import annotations

from typing import Any

import pytest
from identify_kit import asked
from support.character_turns import turn_of
from support.fake_engine import MODEL, Answer, FakeEngine, proxy_before

from leyline_proxy.model.history import HARNESS_HEADERS
from leyline_proxy.model.session import Session
from leyline_proxy.request.identify import Identity, Openings, identify
from leyline_proxy.request.session_name import public_id
from leyline_proxy.sessions import MemorySessionStore

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
    request, openings = asked(messages, headers, **members), Openings()
    tenant = request.tenant
    found = await identify(store, request, openings=openings)
    openings.leave(found.hold)
    assert not len(openings)
    turn = turn_of(messages)

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
    """Two users with one opening and, by chance, one first answer each continue their own."""
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


@pytest.mark.parametrize("name", [".", ".."])
def test_no_session_is_named_like_a_folder(name: str) -> None:
    """Clients take such a name out of a URL before they send it."""
    assert public_id(name).startswith("h-")
    assert public_id(f"{name}a") == f"{name}a"


NAME = {HARNESS_HEADERS[0]: "run"}


def dated(number: int, *rest: dict[str, Any]) -> list[dict[str, Any]]:
    """A conversation of a harness whose system prompt is another on every turn."""
    return [{"role": "system", "content": f"It is {number} o'clock."}, TASK, *rest]


async def test_other_conversations_under_a_name_show_it_with_a_number(
    store: MemorySessionStore,
) -> None:
    """A name that is no id is shown, for the conversations beside the first with their numbers."""
    openings, name = Openings(), {"x-session-id": "team/agent 7"}
    first = await identify(store, asked([TASK], name), openings=openings)
    beside = await identify(store, asked([AGAIN], name), openings=openings)
    assert [each.shown_name for each in (first, beside)] == [
        "team/agent 7",
        "team/agent 7 beside 0",
    ]
    assert first.session_id == public_id("team/agent 7")
    certain = await identify(store, asked([TASK], {"x-leyline-session": "a b"}), openings=openings)
    plain = await identify(store, asked([TASK], {"x-leyline-session": "a-b"}), openings=openings)
    assert [certain.shown_name, plain.shown_name] == ["a b", ""]


async def test_a_conversation_beside_another_stays_one_though_its_opening_changes(
    store: MemorySessionStore,
) -> None:
    """A request for a title may take the harness's name first: the agent after it is still one
    session, and so is the one that it sends out."""
    title = await seen(store, [SYSTEM, {"role": "user", "content": "Give a title."}], NAME)
    assert title.session_id == "run"
    first = await seen(store, dated(1), NAME)
    other = await seen(store, [SYSTEM, AGAIN], NAME)
    second = await seen(store, dated(2, ANSWER, AGAIN), NAME)
    third = await seen(store, dated(3, ANSWER, AGAIN, LATER, TASK), NAME)
    assert first.session_id == second.session_id == third.session_id
    assert third.session is not None
    assert len({title.session_id, first.session_id, other.session_id}) == 3
    assert (await seen(store, [SYSTEM, AGAIN, LATER, AGAIN], NAME)).session_id == other.session_id


async def test_a_name_may_stand_for_any_number_of_conversations(store: MemorySessionStore) -> None:
    """Each begins a session of its own, and those that are appended to continue theirs."""
    tasks = [{"role": "user", "content": f"Task {number}."} for number in range(9)]
    begun = [await seen(store, [SYSTEM, task], NAME) for task in tasks]
    assert len({found.session_id for found in begun}) == 9
    for found, task in zip(begun, tasks, strict=True):
        again = await seen(store, [SYSTEM, task, ANSWER, AGAIN], NAME)
        assert again.session_id == found.session_id


async def test_a_name_is_held_only_while_its_first_turn_runs(store: MemorySessionStore) -> None:
    """Another conversation gets another id meanwhile; if the turn fails, the name is free, and
    nothing is left."""
    openings = Openings()
    first = await identify(store, asked([TASK], NAME), openings=openings)
    beside = await identify(store, asked([AGAIN], NAME), openings=openings)
    retried = await identify(store, asked([TASK], NAME), openings=openings)
    assert first.session_id == retried.session_id == "run" != beside.session_id
    assert len(openings) == 2
    openings.leave(first.hold)
    still = await identify(store, asked([AGAIN], NAME), openings=openings)
    assert still.session_id == beside.session_id
    for identity in (retried, beside, still):
        openings.leave(identity.hold)
    assert len(openings) == 0
    assert (await identify(store, asked([AGAIN], NAME), openings=openings)).session_id == "run"


async def test_counting_takes_no_name(store: MemorySessionStore) -> None:
    """Only requests that are answered do."""
    counted = await identify(store, asked([TASK], NAME))
    assert (counted.session_id, counted.hold) == ("run", None)


@pytest.mark.parametrize("field", ["prompt_cache_key", "user"])
async def test_names_are_kept_short(store: MemorySessionStore, field: str) -> None:
    """A name may be as long as a body, but a long one is neither kept nor reported."""
    found = await seen(store, [SYSTEM, TASK], **{field: "long " * 1000})
    assert len(found.key) < 100
    assert "long" not in found.key
    same = await seen(store, [SYSTEM, TASK, ANSWER], **{field: "long " * 1000})
    assert same.session_id == found.session_id


async def test_a_request_that_fails_leaves_the_name_free() -> None:
    """After a refusal or a breakdown of the engine, the next request with the name has it."""
    engine = FakeEngine(capability=None)
    refusal = Answer([b'{"error": {"message": "no"}}'], status=400)
    broken = Answer([b"{"], status=503)
    engine.answers = [refusal, broken]
    async with proxy_before(engine) as client:
        for number in range(3):
            messages = [{"role": "user", "content": f"Try {number}."}]
            body = {"model": MODEL, "messages": messages}
            answer = await client.post("/v1/chat/completions", json=body, headers=NAME)
            assert answer.headers["x-leyline-session"] == "run", number
    assert answer.status_code == 200
