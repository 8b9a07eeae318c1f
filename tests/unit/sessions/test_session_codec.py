"""Sessions as bytes: nothing is lost, what is shared stays shared, damage is a miss."""

from __future__ import annotations

from array import array
from dataclasses import fields

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.builtin_specs import CASES
from support.examples import examples
from support.sessions import after_turn, blank, history, sessions

from leyline_proxy.model.prepared import Prepared
from leyline_proxy.model.session import RetainedTurn, Session
from leyline_proxy.sessions.codec import FORMAT, decode_session, encode_session
from leyline_proxy.sessions.codec.numbers import common_start, pack_tokens, unpack_tokens

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
    """What was one object in several lists is one object again."""
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
    good = encode_session(long_session(2))
    place = data.draw(st.integers(0, len(good) - 1))
    flipped = bytearray(good)
    flipped[place] ^= data.draw(st.integers(1, 255))
    found = decode_session(bytes(flipped))
    assert found is None or encode_session(found) == good
    assert decode_session(good[:place]) is None
    assert decode_session(good[:HEAD] + data.draw(st.binary(max_size=60))) is None
    assert decode_session(data.draw(st.binary(max_size=60))) is None


def test_another_version_is_a_miss() -> None:
    """A session that a later format wrote isn't read by guesswork."""
    good = encode_session(long_session(1))
    assert decode_session(good) is not None
    assert decode_session(good[:3] + bytes([FORMAT + 1]) + good[4:]) is None


def test_a_new_field_asks_for_a_new_format() -> None:
    """Whoever adds a field to what is stored sees to it that it is stored."""
    assert {field.name for field in fields(Session)} == {
        *("id", "tenant", "key", "turns", "history", "next_index", "updated", "created"),
        *("departed", "policy_states", "completions", "unnamed", "places", "in_flight"),
        *("unvouched", "demands", "untraced"),
    }
    assert {field.name for field in fields(RetainedTurn)} == {
        *("turn", "index", "prepared", "rendered", "output_ids", "lineage", "receipt", "digest"),
        *("model_fingerprint", "weight", "names", "replica", "model"),
    }
    assert {field.name for field in fields(Prepared)} == {
        *("client", "sent", "dropped", "faults", "forget_marks", "notes", "states", "wanted"),
        *("scope", "pins", "used", "known_fingerprints"),
        "refused",  # what isn't sent isn't stored either
    }


def test_turns_are_stored_once() -> None:
    """Four turns of a long history take little more than one."""
    session = long_session()
    alone = session.without({turn.turn for turn in session.turns[:-1]})
    assert len(session.turns) == 4
    assert len(encode_session(session)) < 1.6 * len(encode_session(alone))


@pytest.mark.parametrize("value", [-1, 2**31, 2**40, 2**62])
def test_wide_token_ids_survive(value: int) -> None:
    """An id that fits in no 32 bits is stored in 64."""
    ids = array("q", [1, 2, value, 3])
    assert unpack_tokens(pack_tokens(ids)) == ids


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40))
def test_the_common_start_is_exact(left: list[int], right: list[int]) -> None:
    """Two sequences share as many items from the start as comparing them one by one says."""
    slow = next(
        (at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )
    assert common_start(memoryview(array("q", left)), memoryview(array("q", right))) == slow
    ids, base = array("q", left), array("q", right)
    assert unpack_tokens(pack_tokens(ids, base), base) == ids
