"""The envelope: what is malformed is named, what is unknown is skipped."""

from __future__ import annotations

import json
from array import array
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.contract import (
    CopySegment,
    Directive,
    EditPayload,
    Envelope,
    EnvelopeError,
    LineageRun,
    LiteralSegment,
    Mode,
    SourceRef,
    edit_envelope,
    message_that_asks,
    parse_envelope,
    split_actions,
    token_digest,
)

PAYLOAD = EditPayload(
    session="s",
    scope="t",
    turn="t2",
    sources=(SourceRef("t1", 9, "00"),),
    directives=(Directive(2, 4, (7,), Mode.FORGET),),
    segments=(CopySegment(0, 0, 2, 0), LiteralSegment(2, 3)),
    lineage=(LineageRun(5, "ab"),),
)


def wire(payload: EditPayload = PAYLOAD) -> Any:
    """The envelope as JSON data."""
    return json.loads(msgspec.json.encode(edit_envelope("m1", payload)))


def test_round_trip_over_json() -> None:
    """An edit payload survives the wire unchanged, segment kinds and modes included."""
    payload, _, skipped, _ = split_actions(parse_envelope(wire()))
    assert payload == PAYLOAD
    assert skipped == ()


def test_who_asks_for_the_record_in_the_answer_says_so_in_an_action() -> None:
    """The action is known, so it isn't reported as skipped, and nothing else asks."""
    asks = msgspec.to_builtins(edit_envelope("m1", PAYLOAD, receipt_in_answer=True))
    assert split_actions(parse_envelope(asks)) == (PAYLOAD, None, (), None)
    assert message_that_asks(asks) == "m1"
    assert message_that_asks(wire()) is None


@pytest.mark.parametrize(
    "break_it",
    [
        lambda raw: raw.update(protocol_version="9"),
        lambda raw: raw.update(message_id=3),
        lambda raw: raw.update(actions="leyline.receipt"),
        lambda raw: raw["actions"][1].update(action_version="9.0"),
        lambda raw: raw["actions"].pop(),
        lambda raw: raw.update(actions=["leyline.receipt", None, {}]),
        lambda raw: raw.clear(),
    ],
)
def test_what_doesnt_ask_for_the_record_as_known_here_gets_none(break_it: Any) -> None:
    """An envelope is a client's before anyone has checked it; no shape of it raises."""
    raw = msgspec.to_builtins(edit_envelope("m1", PAYLOAD, receipt_in_answer=True))
    raw["actions"] = list(raw["actions"])
    break_it(raw)
    assert message_that_asks(raw) is None
    assert message_that_asks([raw]) is None


@pytest.mark.parametrize(
    ("break_it", "field"),
    [
        (lambda raw: raw.pop("message_id"), "message_id"),
        (lambda raw: raw.update(message_id=""), "message_id"),
        (lambda raw: raw.update(message_id=3), "message_id"),
        (lambda raw: raw.pop("protocol_version"), "protocol_version"),
        (lambda raw: raw.update(actions={}), "actions"),
        (lambda raw: raw.update(actions=raw["actions"] * 65), "actions"),
        (lambda raw: raw["actions"][0].pop("action_type"), "action_type"),
        (lambda raw: raw["actions"][0].update(payload=[1]), "payload"),
    ],
)
def test_envelope_errors_name_the_field(break_it: Any, field: str) -> None:
    """The error names a missing or mistyped field of the envelope."""
    raw = wire()
    break_it(raw)
    with pytest.raises(EnvelopeError, match=field):
        parse_envelope(raw)


@pytest.mark.parametrize(
    ("break_it", "field"),
    [
        (lambda p: p.pop("session"), "session"),
        (lambda p: p.update(session=""), "session"),
        (lambda p: p.update(scope="x" * 257), "scope"),
        (lambda p: p.update(turn=None), "turn"),
        (lambda p: p["sources"][0].update(length=-1), r"sources\[0\].length"),
        (lambda p: p["sources"][0].pop("digest"), "digest"),
        (lambda p: p["directives"][0].update(start="2"), r"directives\[0\].start"),
        (lambda p: p["directives"][0].update(mode="erase"), r"directives\[0\].mode"),
        (lambda p: p["directives"][0].update(span=1), "span"),
        (lambda p: p["directives"][0].update(replacement=["a"]), "replacement"),
        (lambda p: p["segments"][0].update(kind="move"), r"segments\[0\]"),
        (lambda p: p["segments"][1].pop("length"), "length"),
        (lambda p: p["lineage"][0].update(start=-1), r"lineage\[0\].start"),
        (lambda p: p.update(sink=-1), "sink"),
    ],
)
def test_payload_errors_name_the_field(break_it: Any, field: str) -> None:
    """The error names a missing or mistyped field of the edit payload, with the action."""
    raw = wire()
    break_it(raw["actions"][0]["payload"])
    with pytest.raises(EnvelopeError, match=f"m1.edit.*{field}"):
        split_actions(parse_envelope(raw))


@pytest.mark.parametrize(
    "change",
    [
        {"action_type": "leyline.claim"},
        {"action_type": "other.edit"},
        {"action_version": "1.1"},
        {"action_version": "1"},
    ],
)
def test_unknown_actions_are_skipped(change: dict[str, str]) -> None:
    """An unknown type or version is reported and its payload is never decoded."""
    raw = wire()
    raw["actions"][0].update(change, payload={"garbage": True})
    payload, _, skipped, _ = split_actions(parse_envelope(raw))
    assert payload is None
    assert [action.action_id for action in skipped] == ["m1.edit"]


def test_other_protocol_version_skips_everything() -> None:
    """Under an unknown protocol version not even a known action is guessed at."""
    raw = wire()
    raw["protocol_version"] = "0.2"
    payload, _, skipped, _ = split_actions(parse_envelope(raw))
    assert payload is None
    assert len(skipped) == 1


def test_two_edits_are_refused() -> None:
    """One request carries at most one edit action."""
    raw = wire()
    raw["actions"].append(dict(raw["actions"][0], action_id="again"))
    with pytest.raises(EnvelopeError, match="more than one"):
        split_actions(parse_envelope(raw))


def test_unknown_fields_of_the_envelope_are_ignored() -> None:
    """Other producers of the shared envelope may add fields of their own."""
    raw = wire() | {"vendor": {"x": 1}}
    assert split_actions(parse_envelope(raw))[0] == PAYLOAD


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["protocol_version", "message_id", "actions", "payload", "x"]), inner
        )
    ),
    max_leaves=10,
)


@given(JSON)
def test_any_json_parses_or_is_refused(raw: object) -> None:
    """Any input gives an envelope or an EnvelopeError."""
    with suppress(EnvelopeError):
        assert isinstance(parse_envelope(raw), Envelope)


PLAUSIBLE = st.fixed_dictionaries(
    {},
    optional={
        name: JSON | st.sampled_from([["a"], "a", [{"start": 0, "end": 1}], 1])
        for name in ("session", "scope", "turn", "sources", "directives", "segments", "lineage")
    },
)


@given(PLAUSIBLE)
def test_any_payload_decodes_or_is_refused(payload: dict[str, Any]) -> None:
    """Any content of the payload gives a payload or an EnvelopeError."""
    raw = wire()
    raw["actions"][0]["payload"] = payload
    with suppress(EnvelopeError):
        assert split_actions(parse_envelope(raw))[0] is not None


@given(st.lists(st.integers(0, 2**31), max_size=20))
def test_digest_depends_on_ids_not_on_container(tokens: list[int]) -> None:
    """Both sides of the wire agree on a digest, and one more token changes it."""
    raw = b"".join(token.to_bytes(8, "little", signed=True) for token in tokens)
    assert token_digest(tokens) == token_digest(array("q", tokens))
    assert token_digest(tuple(tokens)) == xxhash.xxh3_64_hexdigest(raw)
    assert token_digest([*tokens, 0]) != token_digest(tokens)
