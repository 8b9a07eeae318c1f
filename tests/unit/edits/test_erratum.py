"""The erratum: which messages end with the note, and that they stay the same from turn to turn."""

from __future__ import annotations

from typing import Any

import pytest

from leyline_engine.contract import Mode
from leyline_policies import Memo, load_pipeline
from leyline_proxy.edits.prepare import PolicySession, prepare
from leyline_proxy.model.messages import Message
from leyline_proxy.model.prepared import Prepared
from leyline_proxy.request.declared import DeclaredEdit

NOTE = "[{name} was cut; notes on it may be stale]"
POLICY = "truncate_older_than:n=0,max_chars=0"


def call(name: str, number: int) -> Message:
    """An assistant's call of a tool."""
    function = {"name": name, "arguments": "{}"}
    entry = {"id": f"c{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [entry]}


TALK: list[Message] = [
    {"role": "user", "content": "read both"},
    call("read_file", 0),
    {"role": "tool", "tool_call_id": "c0", "content": "secret sk-abcdefgh12345678 " + "x" * 200},
    call("ls", 1),
    {"role": "tool", "tool_call_id": "c1", "content": "y" * 200},
    {"role": "assistant", "content": "done"},
    {"role": "user", "content": "go on"},
]


def sent(policies: str, erratum: str = NOTE, **fields: Any) -> Prepared:
    """The talk after the policies."""
    return prepare(TALK, load_pipeline(policies), fields.pop("declared", []), 0, erratum=erratum)


def ends(prepared: Prepared) -> list[str]:
    """The names in the notes of the messages, empty for none."""
    texts = [str(message.get("content")) for message in prepared.messages]
    found = [text.rpartition("[")[2].partition(" was cut")[0] for text in texts]
    return [name if "notes on it" in text else "" for name, text in zip(found, texts, strict=True)]


def test_shortened_results_name_their_tools() -> None:
    """Each ends with the note, the rest is as without it, and nothing else has one."""
    noted, plain = sent(POLICY), sent(POLICY, "")
    assert ends(noted) == ["", "", "read_file", "", "ls", "", ""]
    for with_note, without in zip(noted.messages, plain.messages, strict=True):
        assert str(with_note.get("content")).startswith(str(without.get("content")))


def test_what_is_forgotten_gets_no_note() -> None:
    """Nothing has read it, so nothing is stale; also if another policy shortens it as well."""
    redact = "redact:pattern='secret sk-\\w+'"
    redacted = sent(redact)
    assert "secret" not in str(redacted.messages[2]["content"])
    assert ends(redacted) == [""] * len(TALK)
    both = sent(f"{redact} | {POLICY}")
    assert ends(both) == ["", "", "", "", "ls", "", ""]


def test_a_callers_own_edit_gets_no_note() -> None:
    """Its text is the caller's."""
    declared = [DeclaredEdit(message=2, replacement="short", mode=Mode.AMORTIZE)]
    assert ends(sent("keep_all", declared=declared)) == [""] * len(TALK)


def test_a_message_that_grew_gets_no_note() -> None:
    """A policy's own remark cuts nothing."""

    class Remark:
        name, mode = "remark", "amortize"

        def transform(self, messages: list[Message], turn_idx: int) -> list[Message]:
            return [
                {**m, "content": f"{m['content']} (!)"} if m["content"] else m for m in messages
            ]

    prepared = prepare(TALK, [Remark()], [], 0, erratum=NOTE)
    assert "(!)" in str(prepared.messages[2]["content"])
    assert not any(ends(prepared))


@pytest.mark.parametrize("policies", ["keep_all", "sliding_window:max_messages=2"])
def test_kept_and_dropped_messages_get_no_note(policies: str) -> None:
    """There is nothing that was shortened."""
    assert not any(ends(sent(policies)))


def test_a_noted_message_is_the_same_object_on_the_next_turn() -> None:
    """Nothing about it (its fingerprint, its tokens) is worked out again."""
    session, policies = PolicySession(memo=Memo()), load_pipeline(POLICY)
    first = prepare(TALK, policies, [], 0, session=session, erratum=NOTE)
    grown = [*TALK, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "more"}]
    second = prepare(grown, policies, [], 1, session=session, erratum=NOTE)
    assert first.sent[2] is second.sent[2]
    assert first.messages[2] is second.messages[2]
