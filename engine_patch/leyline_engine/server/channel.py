"""The channel from the schedulers to the HTTP process: receipts, forgets' progress, capabilities.

::

    launcher / HTTP process                      scheduler (attention-TP rank 0 of each DP rank)
    ReceiptChannel  ◀── PULL ── ipc:// ── PUSH ──  ReceiptSender
      └─ RecordBook ◀── routes

The endpoint is a socket in a directory that only this user can enter. Its address reaches the
schedulers by environment, so that they find it whoever starts them. Messages are typed msgpack;
nothing is unpickled. A scheduler never waits: when the HTTP side is slow or gone, new messages are
dropped and counted. A request without a receipt is served all the same.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from leyline_engine.contract import Capability, ForgetCounts, Proof, TurnRecord
from leyline_engine.metrics import EngineMetrics, NoMetrics
from leyline_engine.records.turn_records import RecordBook
from leyline_engine.server.counts import Counts

log = logging.getLogger(__name__)

ENDPOINT_VARIABLE = "LEYLINE_ENGINE_CHANNEL"
"""Environment variable with the endpoint; set while the launcher starts its processes."""
_QUEUED_MESSAGES = 4096


class _Record(msgspec.Struct, frozen=True, tag="record"):
    record: TurnRecord
    scope: str = ""


class _Forgot(msgspec.Struct, frozen=True, tag="forgot"):
    message_id: str
    counts: ForgetCounts


class _Proof(msgspec.Struct, frozen=True, tag="proof"):
    message_id: str
    proof: Proof


class _Announcement(msgspec.Struct, frozen=True, tag="capability"):
    dp_rank: int
    capability: Capability


_Message = _Record | _Forgot | _Proof | _Announcement | Counts


class Sender(Protocol):
    """A scheduler's messages. All methods return at once and raise nothing."""

    def announce(self, capability: Capability) -> None:
        """Send this rank's capability; once, when the scheduler starts."""

    def send(self, record: TurnRecord, scope: str = "") -> None:
        """File a record, or replace the earlier one of the same message.

        Args:
            scope: tenant scope of its session.
        """

    def update_forgot(self, message_id: str, counts: ForgetCounts) -> None:
        """Send the progress of an earlier request's forget."""

    def update_proof(self, message_id: str, proof: Proof) -> None:
        """Send the progress of an earlier request's proof."""

    def count(self, counts: Counts) -> None:
        """Send what was counted."""

    def close(self) -> None:
        """Release the socket; queued messages may be lost."""


class SilentSender:
    """The sender of ranks that repeat another rank's work, and of processes without a channel."""

    def announce(self, capability: Capability) -> None:
        """Send nothing."""

    def send(self, record: TurnRecord, scope: str = "") -> None:
        """Send nothing."""

    def update_forgot(self, message_id: str, counts: ForgetCounts) -> None:
        """Send nothing."""

    def update_proof(self, message_id: str, proof: Proof) -> None:
        """Send nothing."""

    def count(self, counts: Counts) -> None:
        """Send nothing."""

    def close(self) -> None:
        """Release nothing."""


class ReceiptSender:
    """The scheduler's end; for one thread."""

    def __init__(
        self,
        endpoint: str,
        *,
        dp_rank: int = 0,
        queued: int = _QUEUED_MESSAGES,
        on_drop: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            endpoint: endpoint of a :class:`ReceiptChannel`, which needn't listen yet.
            queued: maximum number of messages held while the other side doesn't take them.
            on_drop: called for each message that was dropped.
        """
        self._dp_rank = dp_rank
        self._on_drop = on_drop
        self._dropped = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.set_hwm(queued)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)

    @property
    def dropped(self) -> int:
        """Number of messages that were not sent."""
        return self._dropped

    def announce(self, capability: Capability) -> None:
        """See :class:`Sender`."""
        self._push(_Announcement(self._dp_rank, capability))

    def send(self, record: TurnRecord, scope: str = "") -> None:
        """See :class:`Sender`."""
        self._push(_Record(record, scope))

    def update_forgot(self, message_id: str, counts: ForgetCounts) -> None:
        """See :class:`Sender`."""
        self._push(_Forgot(message_id, counts))

    def update_proof(self, message_id: str, proof: Proof) -> None:
        """See :class:`Sender`."""
        self._push(_Proof(message_id, proof))

    def count(self, counts: Counts) -> None:
        """See :class:`Sender`."""
        self._push(counts)

    def close(self) -> None:
        """See :class:`Sender`."""
        self._context.destroy()

    def _push(self, message: _Message) -> None:
        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except (zmq.ZMQError, ValueError, TypeError, OverflowError) as error:
            self._dropped += 1
            self._on_drop()
            if self._dropped.bit_count() == 1:  # at 1, 2, 4, 8 …
                log.warning(
                    "%d receipts dropped, the last for %s", self._dropped, type(error).__name__
                )


def open_sender(
    *,
    attn_tp_rank: int,
    dp_rank: int | None,
    on_drop: Callable[[], None] = lambda: None,
) -> Sender:
    """Open the sender of a scheduler: one rank of each data-parallel replica speaks.

    Tensor-parallel ranks decide alike, so rank 0 speaks for all.
    """
    if attn_tp_rank != 0:
        return SilentSender()
    endpoint = os.environ.get(ENDPOINT_VARIABLE)
    if not endpoint:
        log.warning("no HTTP process of this node listens: receipts of this scheduler are lost")
        return SilentSender()
    return ReceiptSender(endpoint, dp_rank=dp_rank or 0, on_drop=on_drop)


class ReceiptChannel:
    """The HTTP process's end: a thread that files the schedulers' messages."""

    def __init__(
        self, *, records: RecordBook | None = None, metrics: EngineMetrics | None = None
    ) -> None:
        """Bind a new endpoint and begin to listen.

        Args:
            metrics: counts what schedulers send of their counts.

        Raises:
            OSError: the directory or the socket can't be made.
        """
        self.records = records or RecordBook()
        self._metrics = metrics or NoMetrics()
        self._capabilities: dict[int, Capability] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="leyline-"))  # mode 0700
        self.endpoint = f"ipc://{self._folder / 'receipts'}"
        self._decoder = msgspec.msgpack.Decoder(_Message)
        self._context = zmq.Context()
        socket = self._context.socket(zmq.PULL)
        try:
            socket.bind(self.endpoint)
        except zmq.ZMQError:
            self._context.destroy()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._thread = threading.Thread(
            target=self._listen, args=(socket,), name="leyline-receipts", daemon=True
        )
        self._thread.start()

    def capability(self, replicas: int = 1) -> Capability | None:
        """Return the capability of the whole engine; None until every replica has sent its own.

        One replica that doesn't splice speaks for all: the proxy can't choose a request's replica.

        Args:
            replicas: number of the engine's data-parallel replicas.
        """
        known = dict(self._capabilities)
        if len(known) < replicas:
            return None
        return min((known[rank] for rank in sorted(known)), key=lambda found: found.splices)

    def close(self) -> None:
        """Stop listening and remove the endpoint."""
        self._context.term()  # the listening thread learns of it and closes its socket
        self._thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _listen(self, socket: zmq.Socket[bytes]) -> None:
        with socket:
            while True:
                try:
                    message = self._decoder.decode(socket.recv())
                except zmq.ContextTerminated:
                    return
                except msgspec.DecodeError as error:
                    log.warning("a scheduler's message can't be read: %s", error)
                    continue
                self._file(message)

    def _file(self, message: _Message) -> None:
        match message:
            case _Record(record, scope):
                if record.receipt.forgot is not None and not record.finished:
                    self.records.strip(scope, record.receipt.session)
                self.records.put(record, scope)
            case Counts():
                message.apply(self._metrics)
            case _Proof(message_id, proof):
                self.records.prove(message_id, proof)
            case _Forgot(message_id, counts):
                self.records.update_forgot(message_id, counts)
            case _Announcement(dp_rank, capability):
                self._capabilities[dp_rank] = capability
