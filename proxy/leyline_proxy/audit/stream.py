"""The log's lines as a Redis stream, in addition to the file, which never depends on Redis."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import redis
import structlog

from ..telemetry.metrics import Metrics

log = structlog.get_logger("leyline.audit")

FIELD = "record"
"""Field of a stream entry; its value is the line."""

_MAX_WAITING = 8192
_BATCH = 256
_TIMEOUT_S = 2.0
_FIRST_RETRY_S = 0.2
_LAST_RETRY_S = 10.0


class StreamSink:
    """Adds lines to a stream, from its own thread.

    A line that finds the queue full is counted and left out; readers notice the missing number, and
    find the line in the file.

    Args:
        maxlen: approximate number of entries that the stream keeps.
    """

    def __init__(self, url: str, stream: str, metrics: Metrics, *, maxlen: int) -> None:
        self._client = redis.Redis.from_url(
            url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S
        )
        self._stream = stream
        self._maxlen = maxlen
        self._metrics = metrics
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="leyline-audit-stream", daemon=True)
        self._thread.start()

    def offer(self, lines: Sequence[bytes]) -> None:
        """Queue lines; never blocks on Redis."""
        with self._changed:
            room = max(0, _MAX_WAITING - len(self._waiting))
            self._waiting.extend(lines[:room])
            self._metrics.audit_stream_failures.inc(max(0, len(lines) - room))
            self._changed.notify()

    def close(self, patience_s: float) -> None:
        """Send the waiting lines if Redis accepts them, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(patience_s)

    def _run(self) -> None:
        pause = _FIRST_RETRY_S
        failing = False
        while (batch := self._next()) is not None:
            try:
                self._send(batch)
            except redis.RedisError as error:
                if not failing:
                    log.warning("audit_stream_failed", error=type(error).__name__)
                failing = True
                if self._pause(pause):
                    break
                pause = min(_LAST_RETRY_S, 2 * pause)
                continue
            if failing:
                log.info("audit_stream_works_again")
            failing, pause = False, _FIRST_RETRY_S
            with self._changed:
                for _ in batch:
                    self._waiting.popleft()
        with self._changed:
            self._metrics.audit_stream_failures.inc(len(self._waiting))
        self._client.close()

    def _next(self) -> list[bytes] | None:
        """Return the oldest lines, which stay in the queue until sent; None at the end."""
        with self._changed:
            while not self._waiting and not self._closing:
                self._changed.wait()
            return [self._waiting[at] for at in range(min(_BATCH, len(self._waiting)))] or None

    def _pause(self, pause_s: float) -> bool:
        """Wait; return True at the end, when nothing more should be tried."""
        with self._changed:
            return self._closing or self._changed.wait_for(lambda: self._closing, pause_s)

    def _send(self, lines: Sequence[bytes]) -> None:
        pipe = self._client.pipeline(transaction=True)
        for line in lines:
            pipe.xadd(self._stream, {FIELD: line}, maxlen=self._maxlen, approximate=True)
        pipe.execute()
