"""Turn records by message id: the side channel on which receipts travel."""

from __future__ import annotations

import threading
from collections import OrderedDict

import msgspec

from leyline_engine.contract import ForgetCounts, Proof, ProofPlace, Receipt, TurnRecord

_PLACE = "records"


class RecordBook:
    """The records of the last ``limit`` requests; safe to use from several threads."""

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._records: OrderedDict[str, TurnRecord] = OrderedDict()

    def put(self, record: TurnRecord) -> None:
        """Add a record, or replace the earlier one of the same message.

        News of a forget and its proof since the request began stays.
        """
        with self._lock:
            key = record.receipt.message_id
            earlier = self._records.get(key)
            if earlier is not None and earlier.receipt.forgot is not None:
                record = _with_forgot(record, earlier.receipt.forgot)
            if earlier is not None and earlier.receipt.proof is not None:
                record = self._proven(
                    _with_proof(record, earlier.receipt.proof), earlier.receipt.proof
                )
            self._records[key] = record
            self._records.move_to_end(key)
            while len(self._records) > self._limit:
                self._records.popitem(last=False)

    def update_forgot(self, message_id: str, counts: ForgetCounts) -> None:
        """Note a forget's progress; closes the receipt when nothing is pending."""
        with self._lock:
            record = self._records.get(message_id)
            if record is not None:
                self._records[message_id] = _with_forgot(record, counts)

    def prove(self, message_id: str, proof: Proof) -> None:
        """Note a proof's progress, and add what this book holds of the session's answers.

        A proof may come before its message's record.
        """
        with self._lock:
            record = self._records.get(message_id)
            if record is None:
                record = TurnRecord(receipt=Receipt(message_id=message_id))
            self._records[message_id] = self._proven(record, proof)

    def _proven(self, record: TurnRecord, proof: Proof) -> TurnRecord:
        """Return a record with a proof, and the book's own place in it.

        Later answers are the session's own; only those that were withheld have to go.
        """
        session, before = record.receipt.session, record.receipt.proof
        if not session:
            return _with_proof(record, proof)
        known = [each for each in before.places if each.place == _PLACE] if before else []
        self._strip(session, withheld=bool(known))
        places = [each for each in proof.places if each.place != _PLACE]
        places += known or [self._place(session)]
        return _with_proof(record, msgspec.structs.replace(proof, places=tuple(places)))

    def strip(self, session: str) -> None:
        """Remove the answers' token ids from a session's finished records, as they are text.

        Sessions of several tenants may have one name. A proxy needs the ids only when an answer
        ends, so another tenant loses one turn as a source, at worst.
        """
        with self._lock:
            self._strip(session)

    def _strip(self, session: str, *, withheld: bool = False) -> None:
        """Strip records; if ``withheld``, only those of turns that can be no source."""
        for key, record in self._records.items():
            spared = withheld and record.receipt.turn
            if record.receipt.session == session and record.output_ids and not spared:
                self._records[key] = msgspec.structs.replace(record, output_ids=())

    def _place(self, session: str) -> ProofPlace:
        own = [each for each in self._records.values() if each.receipt.session == session]
        held = sum(bool(each.output_ids) for each in own)
        return ProofPlace(place=_PLACE, scanned=len(self._records), survivors=held)

    def get(self, message_id: str) -> TurnRecord | None:
        with self._lock:
            return self._records.get(message_id)


def _with_forgot(record: TurnRecord, counts: ForgetCounts) -> TurnRecord:
    receipt = msgspec.structs.replace(record.receipt, forgot=counts)
    return msgspec.structs.replace(record, receipt=receipt)


def _with_proof(record: TurnRecord, proof: Proof) -> TurnRecord:
    receipt = msgspec.structs.replace(record.receipt, proof=proof)
    return msgspec.structs.replace(record, receipt=receipt)
