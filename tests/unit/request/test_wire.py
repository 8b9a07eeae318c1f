"""Bodies are changed without touching the bytes that stay."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.contract import RECORD_MEMBER, Receipt, TurnRecord, with_record
from leyline_proxy.request.wire import (
    WireError,
    add_members,
    put_members,
    remove_members,
    replace_messages,
    take_member,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=4), JSON, max_size=5)


def _encode(value: Any, indent: int | None) -> bytes:
    return json.dumps(value, indent=indent, ensure_ascii=indent is None).encode()


@given(OBJECTS, st.sampled_from([None, 2]))
def test_adding_then_removing_gives_the_same_bytes(
    body: dict[str, Any], indent: int | None
) -> None:
    """An appended member leaves no trace once it is removed."""
    raw = _encode(body, indent)
    added = add_members(raw, {"\x00new": b"[1]"})
    assert json.loads(added) == {**body, "\x00new": [1]}
    assert json.loads(remove_members(added, ["\x00new"])) == body
    assert remove_members(raw, ["\x00new"]) == raw


@given(OBJECTS, OBJECTS, st.booleans(), st.sampled_from([None, 2]))
def test_a_member_that_is_put_is_there_once(
    before: dict[str, Any], after: dict[str, Any], there: bool, indent: int | None
) -> None:
    """It takes the place of one of the same name; all others keep theirs."""
    name = "leyline"
    body = {**before, **({name: before} if there else {}), **after}
    put = put_members(_encode(body, indent), {name: b"[1]"})
    pairs = json.loads(put, object_pairs_hook=list)
    assert [key for key, _ in pairs] == [*body, *(() if name in body else (name,))]
    assert json.loads(put) == {**body, name: [1]}


@given(OBJECTS, st.data(), st.sampled_from([None, 2]))
def test_removal_keeps_the_other_members_bytes(
    body: dict[str, Any], data: st.DataObject, indent: int | None
) -> None:
    """Exactly the named members go; each other value stays byte for byte."""
    names = data.draw(st.lists(st.sampled_from(sorted(body)), unique=True)) if body else []
    left = remove_members(_encode(body, indent), names)
    assert json.loads(left) == {key: value for key, value in body.items() if key not in names}


RECORD = TurnRecord(receipt=Receipt(message_id="m"), finished=True, output_ids=(1, 2))


@given(OBJECTS, st.sampled_from([None, 2]), st.sampled_from(["", " \n"]))
def test_a_record_that_an_engine_adds_leaves_no_trace(
    answer: dict[str, Any], indent: int | None, end: str
) -> None:
    """The proxy takes it out of the engine's bytes, white space and escapes included."""
    space = end.encode()
    raw = _encode(answer, indent)[:-1] + space + b"}" + space
    added = with_record(raw, RECORD)
    assert [*json.loads(added)] == [*answer, RECORD_MEMBER]
    left, value = take_member(added, RECORD_MEMBER)
    assert left == raw
    assert value is not None and msgspec.json.decode(value, type=TurnRecord) == RECORD


@given(OBJECTS, st.integers(0, 5), JSON, st.sampled_from([None, 2]))
def test_a_member_is_taken_wherever_it_stands(
    body: dict[str, Any], place: int, value: Any, indent: int | None
) -> None:
    """A gateway may have rewritten the answer; members of that name further in stay."""
    items = [*({**body, "in": {"a": 1, "x": 2}}.items())]
    items = [item for item in items if item[0] != "x"]
    raw = _encode(dict([*items[:place], ("x", value), *items[place:]]), indent)
    left, taken = take_member(raw, "x")
    assert json.loads(left) == dict(items)
    assert taken is not None and json.loads(taken) == value
    assert take_member(left, "x") == (left, None)


@pytest.mark.parametrize("body", [b"", b"[]", b'{"a":1,"x":2', b'{"a":1,"x":2}}', b'"x"', b"{}"])
def test_what_has_no_such_member_stays_as_it_is(body: bytes) -> None:
    """An answer that is cut off is for others to judge."""
    assert take_member(body, "x") == (body, None)


def test_a_reserved_name_given_twice_goes_twice() -> None:
    """A client can't smuggle a member past the removal by repeating it or escaping its name."""
    body = b'{"a": 1.0, "priority": 1, "b":"\\u00e9" , "\\u0070riority" : {"x":"}"}}'
    assert remove_members(body, ["priority"]) == b'{"a": 1.0, "b":"\\u00e9"}'


def test_unchanged_messages_keep_their_bytes() -> None:
    """Only the changed message is encoded again; an unchanged list leaves the body alone."""
    first, second = b'{"role": "user","content":"\\u00e9"}', b'{"role":"user","content":"b"}'
    body = b'{"messages":[' + first + b", " + second + b'],"t":1.0}'
    client = json.loads(body)["messages"]
    assert replace_messages(body, list(enumerate(client)), client) is body
    sent = [(0, client[0]), (1, {"role": "user", "content": "c"})]
    changed = replace_messages(body, sent, client)
    assert first in changed and changed.endswith(b',"t":1.0}')
    assert json.loads(changed)["messages"][1]["content"] == "c"


@pytest.mark.parametrize("body", [b"", b"[]", b"3", b'{"a":'])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    """Bytes of another shape raise instead of growing members."""
    with pytest.raises(WireError):
        remove_members(body, ["a"])
