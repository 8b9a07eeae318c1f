"""Turn records by message id: the side channel on which receipts travel."""

from __future__ import annotations

import threading
from collections import OrderedDict

from leyline_engine.contract import TurnRecord


class RecordBook:
    """The records of the last ``limit`` requests; safe to use from several threads."""

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._records: OrderedDict[str, TurnRecord] = OrderedDict()

    def put(self, record: TurnRecord) -> None:
        """Add a record, or replace the earlier one of the same message."""
        with self._lock:
            key = record.receipt.message_id
            self._records[key] = record
            self._records.move_to_end(key)
            while len(self._records) > self._limit:
                self._records.popitem(last=False)

    def get(self, message_id: str) -> TurnRecord | None:
        with self._lock:
            return self._records.get(message_id)
