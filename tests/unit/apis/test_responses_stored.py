"""Stored responses at rest, lists of their items, and what truncation may drop."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.responses_talks import KEY, TEXT, called, chat, gave, said

from leyline_proxy.apis.fields import FieldError
from leyline_proxy.apis.responses.ids import answer_of, input_id, output_id, owner_of, with_id
from leyline_proxy.apis.responses.stored import joined, list_items
from leyline_proxy.apis.responses.truncation import droppable, with_dropped
from leyline_proxy.model.stored_response import StoredResponse, decode, encode
from leyline_proxy.request.declared import DeclaredEdit, check_declared

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=5,
)


@given(st.lists(st.dictionaries(TEXT, _JSON, max_size=3), max_size=3), _JSON)
def test_a_response_at_rest_is_the_same_response(items: list[dict[str, Any]], value: Any) -> None:
    """It is the same for any JSON from its client, numbers of any size included."""
    kept = StoredResponse(id="r", session="s", input=items, response={"output": [], "x": value})
    assert decode(encode(kept)) == kept


@given(st.binary(max_size=40), st.integers(0, 60))
def test_other_bytes_are_a_miss(noise: bytes, cut: int) -> None:
    """Bytes of another version, cut off, or damaged, count as a miss."""
    whole = encode(StoredResponse(id="r", session="s"))
    assert decode(noise) is None
    assert decode(b"r2" + whole[2:]) is None
    assert decode(whole[: min(cut, len(whole) - 1)]) is None


def test_ids_say_whose_items_they_are() -> None:
    """Given ones count as the response's, but not as its answer; foreign ones have no owner."""
    assert owner_of(output_id("message", KEY, 0)) == f"resp_{KEY}"
    assert owner_of(input_id("unheard_of", KEY, 12)) == f"resp_{KEY}"
    assert answer_of(output_id("function_call", KEY, 0)) == f"resp_{KEY}"
    assert answer_of(input_id("function_call", KEY, 0)) is None
    assert owner_of("fc_1") is owner_of(3) is owner_of("msg_" + KEY) is None
    assert with_id({"id": "mine", "type": "message"}, KEY, 0)["id"] == "mine"
    assert with_id({"role": "user"}, KEY, 3) == {
        "role": "user",
        "type": "message",
        "id": f"msg_{KEY}_i3",
    }


ITEMS = [{**said(str(number)), "id": f"i{number}"} for number in range(5)]


def test_items_are_listed_page_by_page() -> None:
    """Newest first unless asked otherwise; the pages are all there is, once."""
    assert [item["id"] for item in list_items(ITEMS, {})["data"]] == ["i4", "i3", "i2", "i1", "i0"]
    found: list[str] = []
    query = {"limit": "2", "order": "asc"}
    while True:
        page = list_items(ITEMS, query)
        found += [item["id"] for item in page["data"]]
        assert (page["first_id"], page["last_id"]) == (found[-len(page["data"])], found[-1])
        if not page["has_more"]:
            break
        query["after"] = page["last_id"]
    assert found == ["i0", "i1", "i2", "i3", "i4"]
    assert list_items([], {})["data"] == []


def test_a_listed_message_has_parts() -> None:
    """This holds for one that was sent as a string, too."""
    sent = [{"role": "user", "content": "a", "id": "1"}, {"role": "assistant", "content": "b"}]
    mine = list_items(sent, {"order": "asc", "limit": "1"})["data"]
    assert mine[0]["content"] == [{"type": "input_text", "text": "a"}]
    its = list_items([{**sent[1], "id": "2"}], {})["data"]
    assert its[0]["content"] == [{"type": "output_text", "text": "b", "annotations": []}]


@pytest.mark.parametrize(
    "query",
    [
        {"limit": "0"},
        {"limit": "101"},
        {"limit": "x"},
        {"limit": "²"},
        {"order": "up"},
        {"after": "gone"},
    ],
)
def test_a_wrong_page_is_named(query: dict[str, str]) -> None:
    """The error names its parameter."""
    with pytest.raises(FieldError) as refused:
        list_items(ITEMS, query)
    assert [refused.value.param] == list(query)


def test_a_chain_is_its_items_in_order() -> None:
    """The chain has each response's input, then its output."""
    chain = [
        StoredResponse(
            id=str(i), session="s", input=[{"n": 2 * i}], response={"output": [{"n": 2 * i + 1}]}
        )
        for i in range(2)
    ]
    assert [item["n"] for item in joined(chain)] == [0, 1, 2, 3]
    assert "gone" not in chain[0].items


def test_truncation_drops_the_oldest_with_their_results() -> None:
    """Never a system message, a call without its results, or the newest."""
    talk = [said("s", "system"), said("a"), called(), gave("1"), said("b"), said("c")]
    messages = chat([*talk[:4], said("m", "developer"), *talk[4:]])
    units = droppable(messages)
    assert units == [(1,), (2, 3), (5,)]
    body = with_dropped({"messages": messages, "leyline": {"boundary": 2}}, units[:2])
    assert body["leyline"] == {
        "boundary": 2,
        "edits": [{"message": index, "drop": True} for index in (1, 2, 3)],
    }
    assert droppable([]) == []


def test_truncation_spares_the_users_last_message() -> None:
    """An agent with one task and many calls after it keeps the task."""
    messages = chat([said("the task"), called(), gave("1"), called(), gave("2")])
    assert droppable(messages) == [(1, 2)]


def test_truncation_carries_out_what_is_declared_of_what_it_drops() -> None:
    """A message that is to be forgotten is dropped and forgotten; two edits of it would clash."""
    messages = chat([said("a"), said("b"), said("c"), said("d")])
    messages[1]["leyline"] = {"forget": True}
    own = [
        {"message": 0, "replacement": "[gone]", "mode": "forget"},
        {"message": 2, "chars": [0, 1], "replacement": "", "mode": "forget"},
    ]
    body = with_dropped({"messages": messages, "leyline": {"edits": own}}, [(0,), (1,)])
    assert body["leyline"]["edits"] == [
        own[1],
        {"message": 0, "drop": True, "mode": "forget"},
        {"message": 1, "drop": True, "mode": "forget"},
    ]
    check_declared(messages, msgspec.convert(body["leyline"]["edits"], list[DeclaredEdit]))


CALLS = st.sampled_from(["c1", "c2", "c3"])
TURNS = st.one_of(
    st.sampled_from(["user", "system", "assistant"]).map(lambda role: ("said", role)),
    st.lists(CALLS, min_size=1, max_size=2, unique=True).map(lambda ids: ("calls", ids)),
    CALLS.map(lambda identifier: ("gave", identifier)),
)


@given(st.lists(TURNS, min_size=1, max_size=12))
def test_whatever_truncation_drops_can_be_dropped(turns: list[tuple[str, Any]]) -> None:
    """This holds where results come late, and ids of calls come again, too."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    known: set[str] = set()
    for kind, what in turns:
        if kind == "said":
            messages.append({"role": what, "content": "x"})
        elif kind == "calls":
            calls = [{"id": each, "type": "function"} for each in what]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            known.update(what)
        elif what in known:
            messages.append({"role": "tool", "tool_call_id": what, "content": "x"})
    units = droppable(messages)
    for count in range(len(units) + 1):
        body = with_dropped({"messages": messages}, units[:count])
        check_declared(messages, msgspec.convert(body["leyline"]["edits"], list[DeclaredEdit]))
