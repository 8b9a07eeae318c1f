"""A body read by way of an earlier one is the body decoded plainly."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_proxy.model.history import history_chain
from leyline_proxy.model.messages import fingerprint
from leyline_proxy.model.text_memory import Reader
from leyline_proxy.request.bodies import BodyMemory, ReadBody

OWNER = "tenant"
LONG = "a line of a listing, and some more\n" * 40
TEXTS = ("ok", LONG, 'quo"te\\', "naïve 漢字 🙂", '{"messages":[{}]}', '"]}', "")
Message = dict[str, Any]


@st.composite
def messages(draw: st.DrawFn, at: int = 0) -> Message:
    """A message, also of forms that only an engine knows."""
    text = draw(st.sampled_from(TEXTS))
    match draw(st.integers(0, 3)):
        case 0:
            return {"role": "user", "content": [{"type": "text", "text": text}]}
        case 1:
            call = {"id": f"c{at}", "type": "function", "function": {"name": text}}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        case 2:
            return {"content": text, "role": "tool", "tool_call_id": f"c{at}"}
    return {"role": "assistant", "content": text, "extra": {"n": 1.5e3, "m": [None, True]}}


@st.composite
def bodies(draw: st.DrawFn) -> list[bytes]:
    """A session's requests: most continue, some change or leave out earlier messages."""
    written = [json.dumps({"role": "system", "content": LONG})]
    found = []
    style = draw(st.sampled_from(((",", ":"), (", ", ": "))))
    for kind in draw(st.lists(st.sampled_from("ggggged"), min_size=1, max_size=8)):
        at = draw(st.integers(0, len(written) - 1))
        if kind == "d" and len(written) > 1:
            del written[at]
            at -= 1
        fresh = [
            json.dumps(
                draw(messages(len(written))), ensure_ascii=draw(st.booleans()), separators=style
            )
            for _ in range(draw(st.integers(0, 3)))
        ]
        written[at : at + (kind == "e")] = fresh if kind == "e" and fresh else [written[at]]
        written += fresh
        before = draw(st.sampled_from(('"model":"m",', '"n":1,"model" : "x", ', "")))
        behind = draw(st.sampled_from(("", ',"tools":[]', ' , "model":"z","stream":true')))
        space = draw(st.sampled_from(("", " ", "\n")))
        joined = f"{space},{space}".join(written)
        found.append(f'{{{before}"messages":{space}[{joined}{space}]{behind}}}'.encode())
    return found


def read(memory: BodyMemory, raw: bytes) -> ReadBody:
    """Read a body as the proxy does."""
    body = memory.read(OWNER, raw)
    if body is None:
        members = msgspec.json.decode(raw)
        body = ReadBody(raw, members, members["messages"])
    body.complete()
    memory.remember(Reader(OWNER), body)
    return body


@given(bodies())
def test_what_is_read_is_what_decoding_gives(requests: list[bytes]) -> None:
    """Members, messages and fingerprints are those of the body, whatever was before."""
    memory = BodyMemory()
    for raw in requests:
        body = read(memory, raw)
        plain = msgspec.json.decode(raw)
        assert body.members == plain
        assert body.messages == body.members["messages"] == plain["messages"]
        assert body.fingerprints == tuple(map(fingerprint, plain["messages"]))
        for end, message in zip(body.ends, body.messages, strict=False):
            assert raw[:end].endswith(b"}")
            assert msgspec.json.decode(raw[:end] + b"]}")["messages"][-1] == message


def request(*texts: str, behind: str = "") -> bytes:
    """A plain request."""
    written = ",".join(json.dumps({"role": "user", "content": text}) for text in texts)
    return f'{{"model":"m","messages":[{written}]{behind}}}'.encode()


def test_what_was_there_before_is_the_same_objects() -> None:
    """An append decodes what it adds; a retry and a shorter list decode nothing."""
    memory = BodyMemory()
    first = read(memory, request(LONG, "one"))
    second = read(memory, request(LONG, "one", "two"))
    assert second.known == 2
    assert all(new is old for new, old in zip(second.messages, first.messages, strict=False))
    third = read(memory, request(LONG, "one", "two"))
    assert (third.known, third.messages[2]) == (3, second.messages[2])
    assert read(memory, request(LONG, "one")).known == 2
    assert read(memory, request(LONG, "other", "two")).known == 1


def test_owners_share_nothing() -> None:
    """Another owner's body is decoded again, even an equal one."""
    memory = BodyMemory()
    read(memory, request(LONG))
    assert memory.read("another", request(LONG, "more")) is None


@pytest.mark.parametrize(
    "raw",
    [
        request(LONG, "one")[:-2] + b",]}",
        request(LONG, "one")[:-2] + b',{"role":"user"}',
        request(LONG, "one")[:-2] + b"]}]",
        request(LONG, "one") + b"}",
        request(LONG, "one", behind=',"messages":[]'),
        request(LONG, "one")[:-2] + b"," + b"[" * 100_000,
    ],
    ids=["bare comma", "open end", "bracket", "brace", "two lists", "deep"],
)
def test_what_decoding_would_refuse_or_read_otherwise_is_left_to_it(raw: bytes) -> None:
    """No body is accepted, or taken for another, because it begins like an earlier one."""
    memory = BodyMemory()
    read(memory, request(LONG, "one"))
    assert memory.read(OWNER, raw) is None


def test_a_list_that_stands_in_a_body_twice_is_not_remembered() -> None:
    """The start of the messages must be certain."""
    memory = BodyMemory()
    listed = json.dumps([{"role": "user", "content": LONG}])
    raw = f'{{"copy":{listed},"messages":{listed}}}'.encode()
    assert read(memory, raw).members["copy"] == read(memory, raw).messages
    assert memory.remembered_bytes == 0


def test_the_memory_is_bounded() -> None:
    """Many sessions take no more than the bound, and the latest are still known."""
    memory = BodyMemory(max_bytes=100_000)
    for number in range(200):
        read(memory, request(f"{number} {LONG}", "one"))
        assert memory.remembered_bytes <= 100_000
    assert memory.read(OWNER, request(f"199 {LONG}", "one", "two")) is not None
    assert memory.read(OWNER, request(f"0 {LONG}", "one", "two")) is None


def test_a_session_takes_the_room_of_its_latest_body() -> None:
    """A body gives way to the one that continues it."""
    memory = BodyMemory()
    texts = [LONG]
    for number in range(50):
        texts.append(str(number))
        body = read(memory, request(*texts))
    assert memory.remembered_bytes == body.weight


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20), st.integers(0, 20))
def test_a_history_goes_on_from_its_beginning(prints: list[int], known: int) -> None:
    """A chain that is begun is the chain of the whole."""
    whole = history_chain(prints, b"key")
    assert history_chain(prints, b"key", whole[:known]) == whole


FIRST = {"role": "user", "content": LONG}
HEAVY = {
    "text": {"messages": [FIRST, {"role": "user", "content": LONG * 40 + "🙂"}]},
    "lists": {"messages": [{**FIRST, "extra": [[]] * 20_000}]},
    "objects": {"messages": [{**FIRST, "extra": [{"a": {}}] * 10_000}]},
    "names": {"messages": [{**FIRST, "extra": {f"k{n}": n for n in range(20_000)}}]},
    "lists before": {"extra": [[]] * 20_000, "messages": [FIRST]},
    "names after": {"messages": [FIRST], "extra": {f"k{n}": n for n in range(20_000)}},
    "objects after": {"messages": [FIRST], "extra": [{"a": {}}] * 10_000},
    "nested after": {"messages": [FIRST], "extra": [[[[[[[]]]]]]] * 5000},
}


@pytest.mark.parametrize("kind", HEAVY)
def test_a_body_weighs_what_its_objects_take(kind: str) -> None:
    """The memory counts no less than a body's objects take, whatever they are, and none of them
    once it is forgotten."""
    written = json.dumps(HEAVY[kind], separators=(",", ":"), ensure_ascii=False).encode()
    memory = BodyMemory()
    tracemalloc.start()
    try:
        read(memory, bytes(bytearray(written)))
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert memory.remembered_bytes >= 0.95 * taken
    longer = {**HEAVY[kind], "messages": [*HEAVY[kind]["messages"], FIRST]}
    before = memory.remembered_bytes
    read(memory, json.dumps(longer, separators=(",", ":"), ensure_ascii=False).encode())
    assert before < memory.remembered_bytes < 1.5 * before + 10_000
    small = BodyMemory(max_bytes=1)
    read(small, written)
    assert small.remembered_bytes == 0


def test_of_a_session_only_the_newest_body_is_remembered() -> None:
    """A list that no longer has a text leaves none that has it; another session keeps its own."""
    memory = BodyMemory()
    reader, other = Reader("t", "s"), Reader("t", "other")
    bodies = [_body(text) for text in ("secret", "plain", "secret")]
    for who, body in zip((reader, reader, other), bodies, strict=True):
        memory.remember(who, body)
    held = [id(body) for _, body, _ in memory._bodies.values()]
    assert held == [id(bodies[1]), id(bodies[2])]
    assert memory.read("t", bodies[0].raw) is not None  # that of the other session
    memory.forget("t", "other", 0)
    assert memory.left("t", "other", 1) == (0, 0)
    assert memory.left("t", "s", 1) == (1, 0) and memory.left("t", "s", 0) == (0, 1)
    memory.forget("t", "s", None)
    assert memory.remembered_bytes == 0 and not memory._by_mark and not memory._of


def _body(text: str) -> ReadBody:
    """A body of one long message, which has passed all checks."""
    members: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": text * 500}]}
    body = ReadBody(msgspec.json.encode(members), members, members["messages"])
    body.complete()
    return body
