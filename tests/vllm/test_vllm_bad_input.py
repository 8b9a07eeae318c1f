"""Envelopes that lie or are broken, in a real vLLM engine: right tokens and a named reason."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from contract_kit import BLOCK, BOUND, PlayedSession, distance, draw_tokens, expect, load_reference
from oracle_models import OracleModel
from oracle_reference import Fresh
from splice_kit import Answer, SplicingEngine, splicing_engine
from support.bad_input import BAD, HARMLESS, SKIPPED, Change, good_envelope, good_payload

from leyline_engine.contract import (
    Outcome,
    Reason,
    SourceRef,
    apply_directives,
    edit_envelope,
    sign_envelope,
)

SECRET = "the proxy's"
_names = count()


@pytest.fixture(scope="module")
def engine(vllm_model: Path) -> Iterator[SplicingEngine]:
    """An engine with Leyline."""
    with splicing_engine(vllm_model) as started:
        yield started


@pytest.fixture(scope="module")
def subject(vllm_model: Path) -> OracleModel:
    """The same model in transformers."""
    return load_reference(vllm_model)


@pytest.fixture
def opened(engine: SplicingEngine, subject: OracleModel) -> tuple[PlayedSession, SourceRef]:
    """A session with one turn, and that turn."""
    session = PlayedSession(engine, subject, f"bad {next(_names)}", "bad input")
    turn = session.open(draw_tokens(random.Random(session.session), 150))
    return session, turn.answer.ref(turn.name)


def edited(session: PlayedSession, source: SourceRef) -> tuple[int, ...]:
    """The prompt of the good edit."""
    cuts = good_payload(session.session, source, "x").directives
    return (*apply_directives(session.turns[0].tokens, cuts), 77)


def send(
    opened: tuple[PlayedSession, SourceRef], change: Change, *, turn: str = "edited"
) -> Answer:
    """Send the good edit's prompt with a changed envelope."""
    session, source = opened
    payload = good_payload(session.session, source, turn)

    def envelope(name: str) -> object:
        return change(good_envelope(name, payload))

    prompt = {"prompt_token_ids": list(edited(session, source))}
    (answer,) = session.engine.run(
        [session.engine.start_prompt(prompt, envelope=envelope, scores=20)]
    )
    return answer


def check_clean(opened: tuple[PlayedSession, SourceRef], answer: Answer) -> None:
    """The answer is that of a run of its own tokens, and nothing is held any more."""
    session, _ = opened
    assert distance(answer, expect(session.subject, [Fresh(answer.prompt)], answer)) <= BOUND
    cache = session.engine.leyline.cache
    assert cache.free == cache.capacity // BLOCK
    assert not session.engine.leyline.turns


@pytest.mark.parametrize("name", BAD)
def test_a_bad_envelope_is_refused_with_a_reason(
    opened: tuple[PlayedSession, SourceRef], name: str
) -> None:
    """The request is an ordinary prefill, and its receipt says why."""
    change, reason = BAD[name]
    answer = send(opened, change)
    check_clean(opened, answer)
    assert answer.record is not None
    receipt = answer.record.receipt
    assert (receipt.outcome, receipt.reason) == (Outcome.REPREFILLED, reason)
    assert receipt.detail
    assert receipt.tokens.spliced == 0


@pytest.mark.parametrize("name", ["good", *HARMLESS])
def test_a_harmless_envelope_is_spliced(opened: tuple[PlayedSession, SourceRef], name: str) -> None:
    """A control: without the lie the same edit is spliced."""
    answer = send(opened, HARMLESS.get(name, dict))
    assert answer.record is not None
    assert answer.record.receipt.outcome is Outcome.SPLICED


@pytest.mark.parametrize("name", SKIPPED)
def test_an_unknown_action_is_reported_as_skipped(
    opened: tuple[PlayedSession, SourceRef], name: str
) -> None:
    """It isn't acted on."""
    answer = send(opened, SKIPPED[name])
    check_clean(opened, answer)
    assert answer.record is not None
    assert answer.record.receipt.skipped_actions
    assert answer.record.receipt.tokens.spliced == 0


def test_a_replayed_envelope_finds_its_turn_and_nothing_else(
    opened: tuple[PlayedSession, SourceRef],
) -> None:
    """The same edit under the same turn's name twice is spliced twice; with another prompt it is
    refused."""
    first, second = send(opened, dict, turn="twice"), send(opened, dict, turn="twice")
    assert first.record is not None
    assert second.record is not None
    assert first.output == second.output
    session, source = opened
    raw = good_envelope("replayed", good_payload(session.session, source, "twice"))
    prompt = {"prompt_token_ids": [*edited(session, source)[:50], 5, 6, 7]}
    name = session.engine.start_prompt(prompt, envelope=lambda _: raw, scores=20)
    (answer,) = session.engine.run([name])
    check_clean(opened, answer)
    receipt = session.engine.sent.records["replayed"].receipt
    assert receipt.reason in {Reason.TOKEN_MISMATCH, Reason.INVALID_EDIT, Reason.INVALID_DIRECTIVE}
    assert receipt.tokens.spliced == 0


def test_only_signed_envelopes_count_where_a_secret_is_set(
    opened: tuple[PlayedSession, SourceRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unsigned, wrongly signed and altered ones are refused; nothing of them is kept."""
    session, source = opened
    monkeypatch.setattr(session.engine.leyline, "_secret", SECRET)
    payload = good_payload(session.session, source, "signed")

    def signed(raw: dict[str, object], secret: str = SECRET) -> dict[str, object]:
        envelope = sign_envelope(edit_envelope(str(raw["message_id"]), payload), secret)
        return raw | {"signature": envelope.signature}

    def altered(raw: dict[str, object]) -> dict[str, object]:
        return signed(raw) | {"message_id": "another"}

    for change in (dict, lambda raw: signed(raw, "guessed")):
        answer = send(opened, change, turn="signed")
        check_clean(opened, answer)
        assert answer.record is not None
        assert answer.record.receipt.reason is Reason.INVALID_EDIT
        assert send(opened, change, turn="signed").cached <= 64
    check_clean(opened, send(opened, altered, turn="signed"))
    assert session.engine.sent.records["another"].receipt.reason is Reason.INVALID_EDIT
    good = send(opened, signed, turn="signed")
    assert good.record is not None
    assert good.record.receipt.outcome is Outcome.SPLICED
