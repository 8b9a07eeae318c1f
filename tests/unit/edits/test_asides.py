"""Asides and references in a turn's messages, against a conversation played step by step."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from leyline_policies import Memo
from leyline_policies.stubs import address_of
from leyline_proxy.edits.asides import CHANGE, put_back, references_in, unread_places
from leyline_proxy.edits.stage import client_stage
from leyline_proxy.model.asides import (
    RECALL_TOOL,
    Aside,
    RecallCall,
    RecalledTexts,
    anchor_of,
    note_of,
)
from leyline_proxy.model.messages import fingerprint

Messages = list[dict[str, Any]]
TEXTS = [f"part {number} of the output" for number in range(4)]
TOLD = RecalledTexts({address_of(text): text for text in TEXTS})


def recall_call(number: int, text: str) -> dict[str, Any]:
    """A call of the recall tool as an engine's message has it."""
    arguments = json.dumps({"address": address_of(text)})
    function = {"name": RECALL_TOOL, "arguments": arguments}
    return {"id": f"r{number}", "type": "function", "function": function}


def own_call(number: int) -> dict[str, Any]:
    """A call of a client's tool."""
    function = {"name": "shell", "arguments": "{}"}
    return {"id": f"c{number}", "type": "function", "function": function}


@dataclass
class Talk:
    """The two views of one conversation."""

    client: Messages = field(default_factory=list)
    engine: Messages = field(default_factory=list)
    asides: list[Aside] = field(default_factory=list)
    count: int = 0

    def ask(self, text: str) -> None:
        """Add a message of the user's to both."""
        for view in (self.client, self.engine):
            view.append({"role": "user", "content": text})

    def answer(self, said: list[tuple[str, str]], last: str, *, joins: str | None) -> None:
        """Add an answer with recalls: each a text in front of the call, and what is recalled.

        Args:
            joins: what a call beside the client's own one recalls; None for no call.
        """
        prints = [fingerprint(message) for message in self.client]
        anchor = anchor_of(prints, len(prints) - 1)
        for front, text in said:
            self.count += 1
            made = recall_call(self.count, text)
            self.engine.append(
                {"role": "assistant", "content": front or None, "tool_calls": [made]}
            )
            self.engine.append({"role": "tool", "tool_call_id": made["id"], "content": text})
            call = RecallCall(made["id"], made["function"]["arguments"], 0, address_of(text))
            self.asides.append(Aside(anchor, (call,), front))
        shown: dict[str, Any] = {
            "role": "assistant",
            "content": "".join(front for front, _ in said) + last,
        }
        sent: dict[str, Any] = {"role": "assistant", "content": last or (None if said else last)}
        if joins is None:
            self.client.append(shown)
            self.engine.append(sent)
            return
        self.count += 1
        made, own = recall_call(self.count, joins), own_call(self.count)
        shown["tool_calls"], sent["tool_calls"] = [own], [made, own]
        self.client.append(shown)
        self.engine.append(sent)
        call = RecallCall(made["id"], made["function"]["arguments"], 0, address_of(joins))
        self.asides.append(Aside(anchor, (call,), last, own=(own["id"],)))
        self.engine.append({"role": "tool", "tool_call_id": made["id"], "content": joins})
        result = {"role": "tool", "tool_call_id": own["id"], "content": f"result {self.count}"}
        self.client.append(result)
        self.engine.append(result)


def expanded(talk: Talk, client: Messages | None = None, told: RecalledTexts = TOLD) -> Messages:
    """The client's list as the proxy sends it."""
    messages = tuple(talk.client if client is None else client)
    prints = [fingerprint(message) for message in messages]
    memo = Memo()
    stage = put_back(client_stage(messages, memo), prints, talk.asides, told, memo)
    return stage.messages


FRONTS = st.sampled_from(["", "Let me look. ", "Once more: "])
RECALLS = st.lists(st.tuples(FRONTS, st.sampled_from(TEXTS)), max_size=3)
STEPS = st.tuples(
    st.sampled_from(["Go on.", "Continue.", "What is in the file?"]),
    RECALLS,
    st.sampled_from(["Done.", "", "The file is empty."]),
    st.none() | st.sampled_from(TEXTS),
)


def played(steps: list[Any]) -> Talk:
    """The conversation of some steps; each answer says something."""
    talk = Talk()
    for number, (asked, said, last, joins) in enumerate(steps):
        talk.ask(asked)
        talk.answer(said, f"{last} ({number})" if last else f"({number})", joins=joins)
    return talk


@given(st.lists(STEPS, min_size=1, max_size=5))
def test_the_engine_gets_what_it_had(steps: list[Any]) -> None:
    """The client's list with asides is the conversation as the engine saw it."""
    talk = played(steps)
    assert expanded(talk) == talk.engine


@given(st.lists(STEPS, min_size=2, max_size=5), st.data())
def test_a_dropped_answer_takes_its_asides_along(steps: list[Any], data: st.DataObject) -> None:
    """Calls and results stay paired, and texts of other answers stay, whatever the client drops."""
    talk = played(steps)
    places = [at for at, message in enumerate(talk.client) if message["role"] == "assistant"]
    gone = data.draw(st.sampled_from(places))
    later = [m for at, m in enumerate(talk.client) if at != gone]
    kept = [m for m in later if m["role"] != "tool" or calls_in(later, m["tool_call_id"])]
    found = expanded(talk, kept)
    called = [call["id"] for message in found for call in message.get("tool_calls") or ()]
    answered = [message["tool_call_id"] for message in found if message["role"] == "tool"]
    assert sorted(called) == sorted(answered)


def calls_in(messages: Messages, identifier: str) -> bool:
    """True if a message makes the call."""
    made = [call["id"] for message in messages for call in message.get("tool_calls") or ()]
    return identifier in made


def test_a_prompt_ends_with_the_asides_of_its_last_message() -> None:
    """In the turn that follows a recall, the exchange comes after the client's last message."""
    talk = played([("Go on.", [("Let me look. ", TEXTS[0])], "Done.", None)])
    found = expanded(talk, talk.client[:1])
    assert found == talk.engine[:3]
    stage = client_stage(tuple(talk.client[:1]), Memo())
    prints = [fingerprint(message) for message in talk.client[:1]]
    sent = put_back(stage, prints, talk.asides, TOLD, Memo()).sent
    assert [*unread_places(sent)] == [2]
    assert sent[2].changes == (CHANGE,)


def test_a_forgotten_text_leaves_its_reason() -> None:
    """An aside whose text is forgotten says so in the text's place."""
    talk = played([("Go on.", [("", TEXTS[0])], "Done.", None)])
    told = RecalledTexts(causes={address_of(TEXTS[0]): "forgotten"})
    found = expanded(talk, told=told)
    assert found[2]["content"] == note_of("forgotten")
    assert TEXTS[0] not in json.dumps(found)


def test_a_rewritten_answer_keeps_its_text() -> None:
    """An answer that the client rewrote is sent as the client has it; of the exchange, the text
    comes back, and what the model wrote in front of it doesn't."""
    talk = played([("Go on.", [("Let me look. ", TEXTS[0])], "Done.", None)])
    talk.client[1] = {"role": "assistant", "content": "Rewritten."}
    found = expanded(talk)
    assert found[1:3] == [{**talk.engine[1], "content": None}, talk.engine[2]]
    assert found[3] == {"role": "assistant", "content": "Rewritten."}


def test_references_stand_alone_on_a_line() -> None:
    """Only a line that is nothing but a reference counts, in users' and tools' messages only."""
    digits = address_of(TEXTS[0]).removeprefix("sha256:")
    reference = f"leyline://sha256/{digits}"
    inline = [{"role": "user", "content": f"see {reference}"}]
    alone: Messages = [
        {"role": "user", "content": f"see\n  {reference}\n"},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": reference}]},
        {"role": "assistant", "content": reference},
        {"role": "system", "content": reference},
    ]
    assert [*references_in(inline)] == []
    assert [*references_in(alone)] == [address_of(TEXTS[0])] * 2
    talk = Talk(client=alone)
    found = expanded(talk)
    assert found[0]["content"] == f"see\n{TEXTS[0]}\n"
    assert found[1]["content"] == [{"type": "text", "text": TEXTS[0]}]
    assert found[2:] == alone[2:]
