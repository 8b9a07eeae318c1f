"""A session's ledger: states, readers, pages, and nothing of the text."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from support.builtin_specs import CASES
from support.sessions import after_turn, blank, history, sessions

from leyline_proxy.model.messages import fingerprint, text_of
from leyline_proxy.model.session import Session
from leyline_proxy.model.verdicts import Verdict
from leyline_proxy.sessions.ledger import session_ledger

CUT = "truncate_older_than:n=1,max_chars=40"
REDACT = "redact:pattern='result 0'"


def spans(session: Session) -> dict[int, dict[str, Any]]:
    """The messages of the newest list, by index."""
    found = session_ledger(session)["spans"]
    return {each["message"]: each for each in found if each["message"] is not None}


def test_each_message_has_a_state() -> None:
    """Whole, shortened and forgotten ones, and one that its client left out."""
    session = after_turn(blank("s"), history(2))
    assert {each["state"] for each in spans(session).values()} == {"held"}
    cut = spans(after_turn(session, history(3), CUT))
    assert [cut[index]["state"] for index in (0, 1, 3, 7)] == ["held", "held", "edited", "held"]
    redacted = spans(after_turn(session, history(3), REDACT))
    assert [redacted[index]["state"] for index in (1, 3, 5)] == ["held", "forgotten", "held"]
    messages = history(3)
    del messages[2:4]
    document = session_ledger(after_turn(session, messages))
    (gone, _) = [each for each in document["spans"] if each["until"] == 1]
    assert (gone["state"], gone["message"], gone["since"]) == ("gone", None, 0)


def test_readers_are_the_turns_whose_kv_has_read_it() -> None:
    """A turn that shows a message reads it from its place; one that holds spliced KV may have read
    what it doesn't show, from the first spliced token on."""
    session = after_turn(blank("s"), history(2))
    first = session.turns[0]
    session = after_turn(session, history(3), CUT)
    second = session.turns[1]
    (start,) = [run.start for run in second.lineage]
    cut = spans(session)[3]
    (place, *_) = [span.start for span in first.rendered.spans if span.message == 3]
    assert cut["read_by"][0]["turn"] == first.turn
    assert cut["read_by"][0]["from"] <= place
    assert cut["read_by"][1] == {"turn": second.turn, "from": start}
    new = spans(session)[7]
    assert [each["turn"] for each in new["read_by"]] == [second.turn]
    session = after_turn(session, history(4), "truncate_older_than:n=0,max_chars=40")
    assert session.turns[2].lineage
    unseen = spans(session)[9]
    assert (unseen["state"], unseen["read_by"]) == ("edited", [])


@given(sessions(CASES), st.integers(0, 9), st.integers(1, 9))
def test_pages_are_whole_and_hold_no_text(session: Session, offset: int, limit: int) -> None:
    """Pages join to the whole ledger, names are unique, and neither a text nor a hash of one is in
    it."""
    whole = session_ledger(session)
    page = session_ledger(session, offset=offset, limit=limit)
    assert page["spans"] == whole["spans"][offset : offset + limit]
    assert page["truncated"] is (offset + len(page["spans"]) < whole["total"])
    names = [each["span"] for each in whole["spans"]]
    assert len(set(names)) == len(names) == whole["total"]
    assert {name.id for turn in session.turns for name in turn.names.client} <= set(names)
    shown = json.dumps(whole)
    for message in [m for turn in session.turns for m in turn.prepared.client]:
        assert len(text_of(message)) < 12 or text_of(message) not in shown
        assert str(fingerprint(message)) not in shown
    kinds = {type(value) for each in whole["spans"] for value in each.values()}
    assert kinds <= {str, int, type(None), list}
    assert msgspec.json.encode(whole)


def test_verdicts_are_listed_wherever_the_message_is() -> None:
    """A message in quarantine says so, even if nothing else knows its name any more."""
    session = after_turn(blank("s"), history(1))
    name = session.turns[0].names.client[3].id
    known = Verdict((name,), (1,), "verbs", "verdict", "api", role="tool")
    gone = Verdict(("t0-past.1",), (2,), "verbs", "verdict", "api", role="tool")
    found = session_ledger(replace(session, verdicts=(known, gone)))["spans"]
    states = {each["span"]: (each["state"], each["role"]) for each in found}
    assert states[name] == states["t0-past.1"] == ("quarantined", "tool")
    assert [state for state, _ in states.values()].count("quarantined") == 2
