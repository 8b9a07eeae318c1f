"""Broken and lying envelopes on a real server: refused by name, served as if they weren't there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import pytest
from engine_client import EngineClient, new_message_id, request_body, source_of
from sglang_server import SglangServer
from support.bad_input import BAD, HARMLESS, SKIPPED, Change, Envelope, good_envelope, good_payload

from leyline_engine.contract import (
    Directive,
    EditPayload,
    Outcome,
    Reason,
    SourceRef,
    TurnRecord,
    apply_directives,
)

SCOPE = "bad input"
CUTS = (Directive(40, 60, (7, 8)), Directive(80, 90))


@dataclass
class Conversation:
    """A turn that any session may begin with, and the prompt that its edit leads to."""

    client: EngineClient
    opening: list[int]
    source: list[int]
    prompt: list[int]
    honest: list[int]
    """The answer to the prompt without an envelope."""
    sessions: int = 0

    def begin(self) -> tuple[str, SourceRef]:
        """A new session whose first turn the server retains."""
        self.sessions += 1
        session = f"session {self.sessions}"
        answer, _ = self.client.turn(
            self.opening, EditPayload(session=session, scope=SCOPE, turn="t1")
        )
        assert [*self.opening, *answer] == self.source
        return session, source_of("t1", self.source)

    def send(self, change: Change, prompt: list[int]) -> tuple[list[int], TurnRecord]:
        """The edit of a new session, with something done to its envelope."""
        session, source = self.begin()
        name = new_message_id()
        envelope = change(good_envelope(name, good_payload(session, source, "t2")))
        return self.client.with_envelope(prompt, envelope, name)

    def unseen(self) -> list[int]:
        """A prompt to which the edit leads that isn't cached: exact KV is preferred to copies."""
        self.sessions += 1
        cuts = (Directive(40, 60, (9, 10 + self.sessions)), CUTS[1])
        return [*apply_directives(self.source, cuts), 5, 6]


@pytest.fixture(scope="module")
def conversation(mla_server: SglangServer) -> Iterator[Conversation]:
    """The conversation that the cases share."""
    rng = Random("bad input")
    opening = [rng.randrange(10, 400) for _ in range(200)]
    with EngineClient(mla_server.base_url) as client:
        source = [*opening, *client.plain(opening)]
        prompt = [*apply_directives(source, CUTS), 5, 6]
        yield Conversation(client, opening, source, prompt, client.plain(prompt))


@pytest.fixture(autouse=True)
def nothing_is_left(conversation: Conversation) -> Iterator[None]:
    """Check that nothing of the sent request runs, waits or is locked afterwards."""
    yield
    conversation.client.wait_idle()


@pytest.mark.parametrize("name", BAD)
def test_a_bad_envelope_is_refused_by_name(conversation: Conversation, name: str) -> None:
    """The receipt says why; the answer is that of the same request without the envelope."""
    change, reason = BAD[name]
    answer, record = conversation.send(change, conversation.prompt)
    receipt = record.receipt
    assert (receipt.outcome, receipt.reason) == (Outcome.REPREFILLED, reason)
    assert receipt.lineage == ()
    assert receipt.tokens.spliced == 0
    assert answer == conversation.honest


@pytest.mark.parametrize("name", HARMLESS)
def test_replacement_ids_are_not_looked_at(conversation: Conversation, name: str) -> None:
    """Ids that no prompt can have are nothing but a length."""
    _, record = conversation.send(HARMLESS[name], conversation.unseen())
    assert record.receipt.reason is Reason.SPLICED


@pytest.mark.parametrize("name", SKIPPED)
def test_what_is_not_understood_is_reported(conversation: Conversation, name: str) -> None:
    """An unknown version or action is skipped, and the receipt names it."""
    answer, record = conversation.send(SKIPPED[name], conversation.prompt)
    assert record.receipt.outcome is Outcome.UNEDITED
    assert len(record.receipt.skipped_actions) == 1
    assert answer == conversation.honest


def test_the_unchanged_envelope_is_spliced(conversation: Conversation) -> None:
    """Control: the envelope that the cases spoil is accepted as it is."""

    def unchanged(envelope: Envelope) -> Envelope:
        return envelope

    _, record = conversation.send(unchanged, conversation.unseen())
    assert record.receipt.reason is Reason.SPLICED
    assert record.receipt.tokens.spliced > 100


@pytest.mark.parametrize(
    "raw", ["not json", "[]", 7, [], {}, {"message_id": 5}, {"actions": "many"}]
)
def test_what_is_no_envelope_is_served(conversation: Conversation, raw: object) -> None:
    """Anything at all in the envelope's place leaves the answer as it is."""
    body = request_body(conversation.prompt)
    body["sampling_params"]["custom_params"] = {"kv_hints": raw}
    assert conversation.client.post(body)["output_ids"] == conversation.honest


def test_a_turn_that_is_named_again_stays_as_it_was(conversation: Conversation) -> None:
    """A replayed request can't exchange what a later edit draws on."""
    client = conversation.client
    session, source = conversation.begin()
    replayed = EditPayload(session=session, scope=SCOPE, turn="t1")
    client.turn(conversation.opening[::-1], replayed)
    _, record = client.turn(conversation.unseen(), good_payload(session, source, "t2"))
    assert record.receipt.reason is Reason.SPLICED


def test_an_older_envelope_is_judged_by_its_own_source(conversation: Conversation) -> None:
    """Sent once more after the conversation continued, an edit draws on the turn that it names."""
    client = conversation.client
    session, source = conversation.begin()
    payload, prompt = good_payload(session, source, "t2"), conversation.unseen()
    first, before = client.turn(prompt, payload)
    goes_on = EditPayload(session=session, scope=SCOPE, turn="t3", lineage=before.receipt.lineage)
    client.turn([*prompt, *first, 9], goes_on)
    again, after = client.turn(prompt, payload)
    assert again == first
    assert after.receipt.reason is Reason.SPLICED
    assert after.receipt.lineage == before.receipt.lineage


def test_a_source_from_before_a_flush_is_missing(conversation: Conversation) -> None:
    """A flushed server retains nothing, and says so."""
    client = conversation.client
    session, source = conversation.begin()
    client.wait_idle()
    client.http.post("/flush_cache").raise_for_status()
    answer, record = client.turn(conversation.prompt, good_payload(session, source, "t2"))
    assert record.receipt.reason is Reason.MISSING_SOURCE
    assert answer == conversation.honest
