"""Receipts from a scheduler process to the HTTP process: complete, bounded, never waited for."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from leyline_engine.contract import Capability, ForgetCounts, Outcome, Receipt, TurnRecord
from leyline_engine.server.channel import (
    ENDPOINT_VARIABLE,
    ReceiptChannel,
    ReceiptSender,
    SilentSender,
    open_sender,
)

CAPABILITY = Capability(
    engine="sglang",
    engine_version="0.5.23",
    model="m",
    model_fingerprint="f",
    architecture="a",
    vocab_size=10,
    max_context=100,
    splices=True,
)
WAIT_S = 20.0

SCHEDULER = """
import sys
from leyline_engine.contract import Capability, ForgetCounts, Receipt, TurnRecord
from leyline_engine.server.channel import open_sender
import msgspec

sender = open_sender(attn_tp_rank=0, dp_rank=None)
sender.announce(msgspec.json.decode(sys.argv[1], type=Capability))
receipt = Receipt(message_id="m-1", forgot=ForgetCounts(pending=3))
sender.send(TurnRecord(receipt=receipt))
sender.send(TurnRecord(receipt=receipt, finished=True, output_ids=(5, 2**31, 7)))
sender.update_forgot("m-1", ForgetCounts(overwritten=3))
for number in range(1000):
    sender.send(TurnRecord(receipt=Receipt(message_id=f"n-{number}"), finished=True))
sys.stdin.read()
"""


@pytest.fixture
def channel() -> Iterator[ReceiptChannel]:
    """A listening channel."""
    opened = ReceiptChannel()
    yield opened
    opened.close()


def eventually(condition: Callable[[], bool]) -> bool:
    """Return True if ``condition`` comes true in time."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def record(message_id: str, tokens: int = 1) -> TurnRecord:
    return TurnRecord(
        receipt=Receipt(message_id=message_id), finished=True, output_ids=tuple(range(tokens))
    )


def test_a_scheduler_process_is_heard(channel: ReceiptChannel) -> None:
    """All that another process sends arrives in order: capability, records, forget updates."""
    environment = os.environ | {ENDPOINT_VARIABLE: channel.endpoint}
    command = [sys.executable, "-P", "-c", SCHEDULER, msgspec.json.encode(CAPABILITY).decode()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as scheduler:
        assert eventually(lambda: channel.records.get("n-999") is not None)
        assert scheduler.poll() is None
        scheduler.communicate(b"", timeout=WAIT_S)
    assert scheduler.returncode == 0
    assert channel.capability() == CAPABILITY
    found = channel.records.get("m-1")
    assert found is not None
    assert (found.finished, found.output_ids) == (True, (5, 2**31, 7))
    assert found.receipt.forgot == ForgetCounts(overwritten=3)
    assert found.receipt.outcome is Outcome.UNEDITED
    assert all(channel.records.get(f"n-{number}") is not None for number in range(1000))


def test_nobody_else_reaches_the_endpoint(channel: ReceiptChannel) -> None:
    """The socket lies in a folder that only this user can enter, and goes with the channel."""
    folder = Path(channel.endpoint.removeprefix("ipc://")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    channel.close()
    assert not folder.exists()


def test_a_scheduler_never_waits_for_the_http_process() -> None:
    """With no listener, messages beyond the limit are dropped at once, and counted."""
    dropped: list[int] = []
    sender = ReceiptSender(
        "ipc:///nonexistent/endpoint", queued=10, on_drop=lambda: dropped.append(1)
    )
    started = time.monotonic()
    for number in range(1000):
        sender.send(record(f"m-{number}", tokens=1000))
    sender.close()
    assert time.monotonic() - started < 5
    assert sender.dropped == len(dropped) == 990


def test_nothing_is_lost_before_the_connection_stands(
    monkeypatch: pytest.MonkeyPatch, channel: ReceiptChannel
) -> None:
    """A sender may speak at once; within its limit, its messages wait for the connection."""
    monkeypatch.setenv(ENDPOINT_VARIABLE, channel.endpoint)
    sender = open_sender(attn_tp_rank=0, dp_rank=3)
    sender.send(record("m-1"))
    assert eventually(lambda: channel.records.get("m-1") is not None)
    sender.close()


def test_other_ranks_and_nodes_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only attention-TP rank 0 speaks, and only where an HTTP process listens."""
    monkeypatch.setenv(ENDPOINT_VARIABLE, "ipc:///nonexistent/endpoint")
    assert isinstance(open_sender(attn_tp_rank=1, dp_rank=0), SilentSender)
    monkeypatch.delenv(ENDPOINT_VARIABLE)
    alone = open_sender(attn_tp_rank=0, dp_rank=0)
    alone.announce(CAPABILITY)
    alone.send(record("m-1"))
    alone.update_forgot("m-1", ForgetCounts())
    alone.close()


def test_a_message_that_cannot_be_read_is_skipped(channel: ReceiptChannel) -> None:
    """Bytes that follow no message type are logged; what comes after them is filed."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(channel.endpoint)
        for junk in (b"", b"\xc1", msgspec.msgpack.encode({"type": "record", "record": 5})):
            socket.send(junk)
        sender = ReceiptSender(channel.endpoint)
        sender.send(record("m-1"))
        assert eventually(lambda: channel.records.get("m-1") is not None)
        sender.close()


def test_the_engine_splices_only_where_every_replica_does() -> None:
    """The capability is known once all replicas have spoken; one that can't splice decides."""
    channel = ReceiptChannel()
    refusing = msgspec.structs.replace(CAPABILITY, splices=False, unsupported_reason="fp8")
    senders = [ReceiptSender(channel.endpoint, dp_rank=rank) for rank in range(2)]
    senders[0].announce(CAPABILITY)
    senders[0].send(record("m-1"))
    assert eventually(lambda: channel.records.get("m-1") is not None)
    assert channel.capability(2) is None
    senders[1].announce(refusing)
    assert eventually(lambda: channel.capability(2) is not None)
    assert channel.capability(2) == refusing
    for sender in senders:
        sender.close()
    channel.close()
