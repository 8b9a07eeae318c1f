"""Sessions as bytes: nothing is lost, what is shared stays shared, damage is a miss."""

from __future__ import annotations

import random
import tracemalloc
from array import array
from dataclasses import fields, replace

import msgspec
import pytest
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.builtin_specs import CASES
from support.examples import examples
from support.sessions import after_turn, blank, history, sessions

from leyline_policies.recall import Evicted
from leyline_proxy.model.asides import Anchor, Aside, RecallCall
from leyline_proxy.model.prepared import Prepared
from leyline_proxy.model.session import RetainedTurn, Session
from leyline_proxy.sessions import codec
from leyline_proxy.sessions.codec import FORMAT, decode_session, encode_session

SLOW = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
HEAD = 4


def long_session(turns: int = 6, spec: str = "truncate_older_than:n=1,max_chars=70") -> Session:
    """Turns that share nearly everything."""
    session = blank("s-1")
    for turn in range(1, turns + 1):
        session = after_turn(session, history(turn), spec)
    return session


@SLOW
@given(sessions(CASES))
def test_a_session_comes_back_as_it_was(session: Session) -> None:
    """Every field of a session is equal after encoding and decoding, fingerprints included."""
    found = decode_session(encode_session(session))
    assert found == session
    for turn, known in zip(found.turns, session.turns, strict=True):
        assert turn.prepared.client_fingerprints == known.prepared.client_fingerprints
        assert turn.prepared.sent_fingerprints == known.prepared.sent_fingerprints
        assert turn.names.index == known.names.index
        assert turn.tokens == known.tokens


@SLOW
@given(sessions(CASES), st.data())
def test_messages_that_turns_share_are_the_same_objects(
    session: Session, data: st.DataObject
) -> None:
    """One object in several lists is one object again."""
    found = decode_session(encode_session(session))
    assert found is not None
    first: dict[int, int] = {}
    for turn, known in zip(found.turns, session.turns, strict=True):
        lists = (turn.prepared.client, turn.prepared.messages)
        known_lists = (known.prepared.client, known.prepared.messages)
        for messages, originals in zip(lists, known_lists, strict=True):
            for message, original in zip(messages, originals, strict=True):
                assert first.setdefault(id(original), id(message)) == id(message)
    receipts = {id(summary.receipt) for summary in found.history}
    newest = found.turns[-1:]
    assert all(id(turn.receipt) in receipts for turn in newest)


@SLOW
@given(sessions(CASES))
def test_a_session_goes_on_alike_after_decoding(session: Session) -> None:
    """The next turn of a decoded session comes to the same as that of the original."""
    found = decode_session(encode_session(session))
    assert found is not None
    messages = [*session.turns[-1].prepared.client] if session.turns else history(1)
    messages.append({"role": "user", "content": "Go on."})
    spec = "truncate_older_than:n=1,max_chars=30"
    assert after_turn(found, messages, spec) == after_turn(session, messages, spec)


@given(st.data())
@settings(max_examples=examples(200))
def test_damaged_bytes_are_a_miss(data: st.DataObject) -> None:
    """Bytes that were cut, changed or made up are no session, and nothing is raised; a bit that
    the compression has no use for changes nothing."""
    session = long_session(2)
    good = encode_session(session)
    place = data.draw(st.integers(0, len(good) - 1))
    flipped = bytearray(good)
    flipped[place] ^= data.draw(st.integers(1, 255))
    assert decode_session(bytes(flipped)) in (None, session)
    assert decode_session(good[:place]) is None
    assert decode_session(good + data.draw(st.binary(min_size=1, max_size=9))) is None
    assert decode_session(good[:HEAD] + data.draw(st.binary(max_size=60))) is None
    assert decode_session(data.draw(st.binary(max_size=60))) is None


@pytest.mark.parametrize("version", [0, 3, FORMAT + 1, 255])
def test_another_version_is_a_miss(version: int) -> None:
    """A session that an earlier or a later format wrote isn't read by guesswork."""
    good = encode_session(long_session(1))
    assert decode_session(good) is not None
    assert decode_session(good[:3] + bytes([version]) + good[4:]) is None


@given(st.recursive(st.integers(-9, 9) | st.binary() | st.none(), st.lists, max_leaves=9))
def test_a_record_of_something_else_is_a_miss(value: object) -> None:
    """Whole and of this version, but no session."""
    record = zstandard.ZstdCompressor(write_checksum=True).compress(msgspec.msgpack.encode(value))
    assert decode_session(encode_session(blank("s-1"))[:HEAD] + record) is None


def test_a_small_blob_does_not_expand_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A blob longer than any session isn't opened, with or without a stated length, and one that
    would be too long isn't written."""
    session = long_session()
    good = encode_session(session)
    monkeypatch.setattr(codec, "MAX_RECORD", len(good))
    assert decode_session(good) is None
    with pytest.raises(codec.UNENCODABLE):
        encode_session(session)
    zeros = bytes(1 << 24)
    for says in (True, False):
        blob = zstandard.ZstdCompressor(write_content_size=says).compress(zeros)
        assert len(blob) < 2000
        tracemalloc.start()
        assert decode_session(good[:HEAD] + blob) is None
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < len(zeros)


def test_numbers_of_a_client_survive_exactly() -> None:
    """Integers beyond 64 bits and any float, in messages and in what policies left."""
    numbers = [2**64, -(2**63) - 1, 10**40, 0.1, 5e-324, 1.7976931348623157e308, -0.0, 1e22, 3.0]
    message = {"role": "user", "content": "Go on.", "x": {"deep": [numbers]}}
    session = after_turn(blank("s-1"), [*history(1), message])
    turn = session.turns[0]
    prepared = replace(turn.prepared, pins={1: {"x": numbers}}, states={"0": {"x": numbers}})
    session = replace(
        session, turns=(replace(turn, prepared=prepared),), policy_states={"1": {"x": numbers}}
    )
    found = decode_session(encode_session(session))
    assert found == session
    again = found.turns[0].prepared
    kept = (again.client[-1]["x"]["deep"][0], again.pins[1]["x"], found.policy_states["1"]["x"])
    assert all(list(map(repr, each)) == list(map(repr, numbers)) for each in kept)


def test_a_new_field_asks_for_a_new_format() -> None:
    """A change that adds a field to the stored data must store it."""
    assert {field.name for field in fields(Session)} == {
        *("id", "tenant", "key", "turns", "history", "next_index", "updated", "created"),
        *("departed", "policy_states", "completions", "unnamed", "places", "in_flight"),
        *("unvouched", "demands", "untraced", "verdicts", "readings", "asides", "recalled"),
        *("name", "tools"),
    }
    assert {field.name for field in fields(RetainedTurn)} == {
        *("turn", "index", "prepared", "rendered", "output_ids", "lineage", "receipt", "digest"),
        *("model_fingerprint", "weight", "names", "replica", "model", "sentences", "for_policy"),
        *("offers_tools", "retells"),
    }
    assert {field.name for field in fields(Prepared)} == {
        *("client", "sent", "dropped", "faults", "forget_marks", "notes", "states", "wanted"),
        *("scope", "pins", "used", "known_fingerprints", "quarantined"),
        *("recalls", "forgets_recalled"),
        "refused",  # what isn't sent isn't stored either
        *("evicted", "working_set"),  # nor is what one turn alone needs
    }


def test_asides_come_back_and_evicted_texts_do_not() -> None:
    """A session keeps its recalls by address, and no text that a policy evicted."""
    calls = (
        RecallCall("c0", "{}", 1, "sha256:" + "a" * 32, None, 7, "prune", True),
        RecallCall("c1", "{}", 2, cause="forgotten"),
    )
    aside = Aside(Anchor(-5, 2), calls, "Let me look.", "Hm.", ("own",))
    turn = after_turn(blank("s-1"), history(1)).turns[0]
    evicted = (Evicted("sha256:" + "b" * 32, "an evicted text", "tool", "bash", 3, "prune"),)
    turn = replace(turn, prepared=replace(turn.prepared, evicted=evicted, recalls=True))
    session = replace(blank("s-1"), turns=(turn,), asides=(aside,), recalled=True)
    encoded = encode_session(session)
    found = decode_session(encoded)
    assert found is not None
    assert (found.asides, found.recalled, found.turns[0].prepared.recalls) == ((aside,), True, True)
    assert found.turns[0].prepared.evicted == ()
    emptied = replace(turn, prepared=replace(turn.prepared, evicted=()))
    assert encoded == encode_session(replace(session, turns=(emptied,)))
    assert session.without_text().asides == ()


def test_turns_are_stored_once() -> None:
    """Four turns of a long history take little more than one."""
    session = long_session()
    alone = session.without({turn.turn for turn in session.turns[:-1]})
    assert len(session.turns) == 4
    assert len(encode_session(session)) < 1.6 * len(encode_session(alone))


def test_a_turn_far_behind_is_found() -> None:
    """Turns are stored once also where more lies between them than a compressor usually sees."""
    ids = random.Random(1).choices(range(150_000), k=800_000)
    newest = after_turn(blank("s-1"), history(1)).turns[0]
    long = replace(newest, rendered=replace(newest.rendered, tokens=array("q", ids)))
    one, two = (replace(blank("s-1"), turns=(long,) * count) for count in (1, 2))
    assert len(encode_session(two)) < 1.01 * len(encode_session(one))


@given(st.lists(st.integers(0, 2**24) | st.integers(-(2**63), 2**63 - 1), max_size=20))
@example([])
@example([0, 0])
@example([2**24 - 1, 2**24])
@example([-1, 2**62])
def test_token_ids_of_any_width_survive(ids: list[int]) -> None:
    """Each turn's ids are stored in as few bytes as they need, and come back as they were."""
    turn = after_turn(blank("s-1"), history(1)).turns[0]
    turn = replace(turn, rendered=replace(turn.rendered, tokens=array("q", ids)))
    found = decode_session(encode_session(replace(blank("s-1"), turns=(turn,))))
    assert found is not None
    assert found.turns[0].rendered.tokens == array("q", ids)
    assert found.turns[0].rendered.tokens.typecode == "q"
