"""Turn records by message id: the side channel on which receipts travel."""

from __future__ import annotations

import threading
from collections import OrderedDict

import msgspec

from leyline_engine.contract import ForgetCounts, TurnRecord


class RecordBook:
    """The records of the last ``limit`` requests; safe to use from several threads."""

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._records: OrderedDict[str, TurnRecord] = OrderedDict()

    def put(self, record: TurnRecord) -> None:
        """Add a record, or replace the earlier one of the same message.

        News of a forget since the request began stays.
        """
        with self._lock:
            key = record.receipt.message_id
            earlier = self._records.get(key)
            if earlier is not None and earlier.receipt.forgot is not None:
                record = _with_forgot(record, earlier.receipt.forgot)
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

    def get(self, message_id: str) -> TurnRecord | None:
        with self._lock:
            return self._records.get(message_id)


def _with_forgot(record: TurnRecord, counts: ForgetCounts) -> TurnRecord:
    receipt = msgspec.structs.replace(record.receipt, forgot=counts)
    return msgspec.structs.replace(record, receipt=receipt)
