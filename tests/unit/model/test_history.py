"""Choosing the conversation that a message list continues."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_proxy.model.history import (
    HistoryMatch,
    carries_on,
    choose_sessions,
    goes_on,
    history_chain,
    history_key,
    session_key,
    shortest_partial,
)

ROLES = ("system", "user", "assistant", "tool", "assistant", "tool")


def whole(session: str, length: int) -> HistoryMatch:
    """A conversation that the list continues."""
    return HistoryMatch(session, length, whole=True)


def part(session: str, length: int) -> HistoryMatch:
    """A conversation that the list shares a beginning with."""
    return HistoryMatch(session, length, whole=False)


@pytest.mark.parametrize(
    ("matches", "chosen"),
    [
        ([], ""),
        ([whole("a", 2)], "a"),
        ([part("a", 3)], "a"),
        ([part("a", 3), part("b", 3)], ""),
        ([part("a", 5), part("b", 3)], "a"),
        ([part("a", 3), whole("b", 2)], "b"),
        ([part("a", 4), whole("b", 2)], "ab"),
        ([part("a", 4), part("c", 4), whole("b", 2)], "b"),
        ([part("a", 6), whole("b", 4)], "b"),
    ],
    ids=[
        "nothing in common",
        "continued",
        "edited",
        "two that could be meant",
        "the one that shares more",
        "shares only an equal answer",
        "shares what the client said after the answer",
        "ambiguous edit, certain continuation",
        "one turn ahead of its own, as far as another run of the task",
    ],
)
def test_the_right_session_or_none(matches: list[HistoryMatch], chosen: str) -> None:
    """A continuation is certain; an edited history counts when only one can be meant, and if it
    later proves to differ, the continuation is left."""
    assert "".join(match.session for match in choose_sessions(matches, ROLES)) == chosen


def test_an_edited_history_shares_task_and_first_answer() -> None:
    """Opening alike is not enough."""
    assert shortest_partial(ROLES) == 3
    assert shortest_partial(("assistant", "user", "assistant")) == 3
    assert shortest_partial(("system", "user")) == 3


def test_an_edited_history_goes_on_alike() -> None:
    """After the edit an answer or a tool result must recur; a user's "go ahead" proves nothing."""
    stored = [1, 2, 3, 4, 5, 6]
    assert goes_on(stored, [1, 2, 3, 40, 5, 6], ROLES, 3)
    assert not goes_on(stored, [1, 2, 3, 40, 50, 60], ROLES, 3)
    assert not goes_on(stored, [1, 2, 3, 40, 5], ("system", "user", "assistant", "tool", "user"), 3)


def test_equal_beginnings_have_equal_chains() -> None:
    """The chain differs from the first message that differs."""
    first, second = history_chain([1, 2, 3]), history_chain([1, 2, 4])
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert history_chain([2, 1])[1] != first[1]


def test_chains_are_keyed() -> None:
    """Proxies with one secret find each other's sessions; no other chains mean anything."""
    chain = history_chain([1, 2, 3], history_key("secret"))
    assert chain == history_chain([1, 2, 3], history_key("secret"))
    assert not set(chain) & set(history_chain([1, 2, 3], history_key("another")))
    assert not set(chain) & set(history_chain([1, 2, 3]))


def test_the_callers_own_session_id_comes_first() -> None:
    """Headers come before body fields, ours before those of harnesses."""
    headers = {"x-leyline-session": "ours", "session_id": "theirs"}
    body = {"prompt_cache_key": "key", "metadata": {"session_id": "meta"}, "user": "me"}
    assert session_key(headers, body) == ("ours", "x-leyline-session")
    assert session_key({"session_id": "theirs"}, body) == ("theirs", "session_id")
    assert session_key({}, body) == ("key", "prompt_cache_key")
    assert session_key({}, {"metadata": {"session_id": "meta"}, "user": "me"})[0] == "meta"
    assert session_key({}, {"metadata": "no object", "user": 7})[0] is None


def test_an_agent_of_claude_code_has_a_name_of_its_own() -> None:
    """A sub-agent's requests name it under the session; the main agent's, and other harnesses', are
    named by the session alone."""
    session, agent = "x-claude-code-session-id", "x-claude-code-agent-id"
    assert session_key({session: "s1"}, {}) == ("s1", session)
    assert session_key({session: "s1", agent: " "}, {}) == ("s1", session)
    assert session_key({session: "s1", agent: "a1"}, {}) == ("s1:agent:a1", session)
    assert session_key({"session_id": "s1", agent: "a1"}, {}) == ("s1", "session_id")
    assert session_key({agent: "a1"}, {})[0] is None
    own = {"x-leyline-session": "ours", session: "s1", agent: "a1"}
    assert session_key(own, {}) == ("ours", "x-leyline-session")


PRINTS = st.lists(st.integers(0, 30), min_size=1, max_size=8)


@given(PRINTS, PRINTS)
def test_what_goes_on_from_a_conversations_list_is_that_conversations(
    stored: list[int], more: list[int]
) -> None:
    """A list that begins with the whole of a stored one continues it, whatever comes after."""
    roles = ["assistant"] * len(stored + more)
    assert carries_on([stored], stored + more, roles)


@given(PRINTS, PRINTS)
def test_conversations_with_the_frame_alone_in_common_are_two(
    stored: list[int], given: list[int]
) -> None:
    """The same system prompt says nothing; nor does an opening that has a message in common."""
    apart = [value + 100 for value in given]
    roles = ["system", *(["assistant"] * len(apart))]
    assert not carries_on([[7, *stored]], [7, *apart], roles)
    opening = ["system", *(["user"] * len(stored))]
    assert not carries_on([[7, 8, *stored]], [7, *stored], opening)


@given(PRINTS, st.integers(0, 30))
def test_a_history_that_was_edited_at_its_front_is_still_the_conversations(
    stored: list[int], kept: int
) -> None:
    """One message of the agent's that is left is enough."""
    assert carries_on([[*stored, kept]], [200, 201, kept], ["system", "user", "assistant"])
