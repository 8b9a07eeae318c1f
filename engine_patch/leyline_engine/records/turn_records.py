"""Turn records by message id: the side channel on which receipts travel."""

from __future__ import annotations

import threading
from collections import OrderedDict
from itertools import takewhile
from secrets import token_hex

import msgspec

from leyline_engine.contract import RECORDS, ForgetCounts, Proof, ProofPlace, Receipt, TurnRecord


class RecordBook:
    """The records of the last ``limit`` requests; safe to use from several threads.

    Sessions of several tenants may have one name, so a record comes with its tenant scope.

    Args:
        instance: name of the engine's run, which each record gets; a new one by default.
    """

    def __init__(self, limit: int = 4096, *, instance: str | None = None) -> None:
        self.instance = token_hex(8) if instance is None else instance
        self._limit = limit
        self._lock = threading.Lock()
        self._records: OrderedDict[str, TurnRecord] = OrderedDict()
        self._scopes: dict[str, str] = {}

    def put(self, record: TurnRecord, scope: str = "") -> TurnRecord:
        """Add a record, or replace the earlier one of the same message; return it as it is kept.

        News of a forget and its proof since the request began stays.

        Args:
            scope: tenant scope of the record's session.
        """
        record = self._of_this_run(record)
        with self._lock:
            key = record.receipt.message_id
            self._scopes[key] = scope
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
                gone, _ = self._records.popitem(last=False)
                self._scopes.pop(gone, None)
            return record

    def _of_this_run(self, record: TurnRecord) -> TurnRecord:
        return msgspec.structs.replace(record, instance=self.instance)

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
                # Its session is known as soon as the record itself comes.
                record = self._of_this_run(TurnRecord(receipt=Receipt(message_id=message_id)))
            self._records[message_id] = self._proven(record, proof)

    def _proven(self, record: TurnRecord, proof: Proof) -> TurnRecord:
        """Return a record with a proof, and the book's own place in it.

        Later answers are the session's own; only those that were withheld have to go.
        """
        session, before = record.receipt.session, record.receipt.proof
        if not session:
            return _with_proof(record, proof)
        known = [each for each in before.places if each.place == RECORDS] if before else []
        scope = self._scopes[record.receipt.message_id]
        # Before they are stripped: a proof reports what the forget left.
        place = known or [self._place(scope, record.receipt)]
        self._strip(scope, session, withheld=bool(known))
        places = [each for each in proof.places if each.place != RECORDS]
        return _with_proof(record, msgspec.structs.replace(proof, places=(*places, *place)))

    def strip(self, scope: str, session: str) -> None:
        """Remove the answers' token ids from a session's finished records, as they are text.

        Args:
            scope: the session's tenant.
        """
        with self._lock:
            self._strip(scope, session)

    def _strip(self, scope: str, session: str, *, withheld: bool = False) -> None:
        """Strip records; if ``withheld``, only those of turns that can be no source."""
        for key, record in self._records.items():
            spared = withheld and record.receipt.turn
            if self._is_of(key, scope, session) and record.output_ids and not spared:
                self._records[key] = msgspec.structs.replace(record, output_ids=())

    def _is_of(self, key: str, scope: str, session: str) -> bool:
        owner = (self._scopes.get(key, ""), self._records[key].receipt.session)
        return owner == (scope, session)

    def _place(self, scope: str, receipt: Receipt) -> ProofPlace:
        """Count the session's answers that are older than the request that forgets."""
        older = takewhile(lambda key: key != receipt.message_id, self._records)
        held = sum(
            bool(self._records[key].output_ids)
            for key in older
            if self._is_of(key, scope, receipt.session)
        )
        return ProofPlace(place=RECORDS, scanned=len(self._records), survivors=held)

    def get(self, message_id: str) -> TurnRecord | None:
        with self._lock:
            return self._records.get(message_id)


def _with_forgot(record: TurnRecord, counts: ForgetCounts) -> TurnRecord:
    receipt = msgspec.structs.replace(record.receipt, forgot=counts)
    return msgspec.structs.replace(record, receipt=receipt)


def _with_proof(record: TurnRecord, proof: Proof) -> TurnRecord:
    receipt = msgspec.structs.replace(record.receipt, proof=proof)
    return msgspec.structs.replace(record, receipt=receipt)
