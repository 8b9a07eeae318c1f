"""Answers in an engine's records, as proofs count and strip them."""

from __future__ import annotations

import msgspec
import pytest

from leyline_engine.contract import PLACES, RECORDS, Proof, ProofPlace, Receipt, TurnRecord
from leyline_engine.records.turn_records import RecordBook

OPEN = Proof(pending=True)


def answer(name: str, *, turn: str = "t", session: str = "s") -> TurnRecord:
    """A finished record with an answer; without a turn, it was withheld."""
    receipt = Receipt(message_id=name, session=session, turn=turn)
    return TurnRecord(receipt=receipt, finished=True, output_ids=(1, 2))


@pytest.fixture
def book() -> RecordBook:
    """An answer of a session, one of another tenant's of the same name, and one that forgets."""
    book = RecordBook()
    book.put(answer("own"), "red")
    book.put(answer("theirs"), "blue")
    book.put(TurnRecord(receipt=Receipt(message_id="asks", session="s")), "red")
    return book


def held(book: RecordBook) -> set[str]:
    names = ("own", "theirs", "later", "withheld")
    return {name for name in names if (found := book.get(name)) and found.output_ids}


def found(book: RecordBook) -> int:
    """Survivors in the records."""
    record = book.get("asks")
    assert record is not None and record.receipt.proof is not None
    (place,) = [each for each in record.receipt.proof.places if each.place == RECORDS]
    return place.survivors


def test_a_tenant_strips_its_own_answers_alone(book: RecordBook) -> None:
    """A session of the same name of another tenant keeps its answers."""
    book.strip("red", "s")
    assert held(book) == {"theirs"}
    book.prove("asks", OPEN)
    assert held(book) == {"theirs"} and found(book) == 0


def test_an_answer_that_was_not_stripped_is_a_survivor(book: RecordBook) -> None:
    """A proof counts what the forget left, then strips it."""
    book.prove("asks", OPEN)
    assert found(book) == 1 and held(book) == {"theirs"}
    book.prove("asks", Proof(pending=False))
    assert found(book) == 1


def test_an_answer_since_the_forget_is_no_survivor(book: RecordBook) -> None:
    """Turns that end between a forget and its first proof are the session's own, and stay later."""
    book.strip("red", "s")
    book.put(answer("withheld", turn=""), "red")
    book.prove("asks", OPEN)
    assert found(book) == 0 and held(book) == {"theirs"}
    book.put(answer("later"), "red")
    book.put(answer("withheld", turn=""), "red")
    book.prove("asks", Proof(pending=False))
    assert found(book) == 0 and held(book) == {"theirs", "later"}


@pytest.mark.parametrize("place", sorted(PLACES))
def test_a_proof_that_lacks_a_place_is_never_complete(place: str) -> None:
    """An engine that leaves one out has not looked everywhere."""
    whole = Proof(pending=False, places=tuple(ProofPlace(place=each) for each in PLACES))
    rest = tuple(each for each in whole.places if each.place != place)
    assert whole.complete and not msgspec.structs.replace(whole, places=rest).complete
