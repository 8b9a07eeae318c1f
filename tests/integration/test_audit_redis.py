"""The audit log's Redis stream, with a real server that is killed meanwhile."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import redis
from prometheus_client import CollectorRegistry
from support.waiting import wait

from leyline_proxy.audit.chain_file import ChainFile
from leyline_proxy.audit.check import Checked, check_file
from leyline_proxy.audit.files import rotated
from leyline_proxy.audit.reading import find_logs, records, verify
from leyline_proxy.audit.records import claim_record
from leyline_proxy.audit.stream import FIELD, StreamSink
from leyline_proxy.audit.writer import AuditWriter
from leyline_proxy.telemetry.metrics import Metrics

STREAM = "leyline:audit"


def server() -> str:
    """The Redis server's program."""
    own = Path(sys.executable).with_name("redis-server")
    found = str(own) if own.exists() else shutil.which("redis-server")
    if found is None:
        pytest.fail("no redis-server: make setup")
    return found


@contextmanager
def running(folder: Path, port: int) -> Iterator[redis.Redis]:
    """A client of a server that answers; the server is killed at the end."""
    command = [server(), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    process = subprocess.Popen(
        [*command, "--appendonly", "yes", "--appendfsync", "always", "--save", ""],
        stdout=subprocess.DEVNULL,
    )
    client = redis.Redis(port=port, socket_timeout=2)
    try:
        wait(partial(answers, client))
        yield client
    finally:
        client.close()
        process.kill()
        process.wait()


def answers(client: redis.Redis) -> bool:
    """Return True if the server is there."""
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def lines(client: redis.Redis) -> list[bytes]:
    """The records in the stream."""
    return [entry[FIELD.encode()] for _, entry in client.xrange(STREAM)]


@pytest.fixture
def port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number


@contextmanager
def writing(
    path: Path, port: int, maxlen: int = 10_000, max_bytes: int = 1 << 20
) -> Iterator[tuple[AuditWriter, Metrics]]:
    """A writer with a stream beside its file."""
    metrics = Metrics(CollectorRegistry())
    sink = StreamSink(f"redis://127.0.0.1:{port}/0", STREAM, metrics, maxlen=maxlen)
    file = ChainFile(path, key=None, instance="i", version="1", max_bytes=max_bytes, keep=0)
    writer = AuditWriter(file, metrics, max_waiting=100_000, fsync_s=0.05, stream=sink)
    writer.start()
    try:
        yield writer, metrics
    finally:
        writer.close(5)


def offer(writer: AuditWriter, numbers: range) -> None:
    """Events of claims."""
    for number in numbers:
        writer.offer(partial(claim_record, "run", {"seq": number}, 1.0))


def test_the_stream_has_the_same_lines(tmp_path: Path, port: int) -> None:
    """Byte for byte, with those of starts, rotations and ends: the chain can be checked there."""
    path = tmp_path / "audit.jsonl"
    with running(tmp_path, port) as client:
        for numbers in (range(1, 101), range(101, 201)):
            with writing(path, port, max_bytes=8192) as (writer, metrics):
                offer(writer, numbers)
            assert metrics.audit_stream_failures._value.get() == 0
        streamed = lines(client)
    files = [*rotated(path).values(), path]
    assert len(files) > 3
    assert streamed == [line for file in files for line in file.read_bytes().splitlines()]
    checked = Checked()
    check_file(b"".join(line + b"\n" for line in streamed), checked, [])
    assert (checked.finding, checked.records) == (None, 204 + len(files) - 1)


def test_the_file_goes_on_without_redis(tmp_path: Path, port: int) -> None:
    """Nothing is lost in the file while the server is gone, and the stream catches up when it is
    back."""
    path = tmp_path / "audit.jsonl"
    with writing(path, port) as (writer, metrics):
        with running(tmp_path, port) as client:
            offer(writer, range(1, 51))
            wait(lambda: len(lines(client)) == 51)
        offer(writer, range(51, 101))
        wait(lambda: path.read_bytes().count(b'"claim"') == 100)
        with running(tmp_path, port) as client:
            wait(lambda: len(lines(client)) >= 101)
            own = path.read_bytes().splitlines()
            assert list(dict.fromkeys(lines(client))) == own
        assert metrics.audit_stream_failures._value.get() == 0
        assert metrics.audit_failures._value.get() == 0
    assert verify(find_logs(path)[0]).good


def test_a_server_that_never_comes_is_counted(tmp_path: Path, port: int) -> None:
    """Records that the stream never got are counted, at the end and beyond the waiting limit; the
    file has them all."""
    path = tmp_path / "audit.jsonl"
    started = time.monotonic()
    with writing(path, port) as (writer, metrics):
        offer(writer, range(1, 9001))
    kinds = [record["kind"] for record in records(find_logs(path)[0])]
    assert kinds.count("claim") == 9000
    assert metrics.audit_stream_failures._value.get() == len(kinds)
    assert verify(find_logs(path)[0]).good
    assert time.monotonic() - started < 15


def test_the_stream_keeps_so_many_entries(tmp_path: Path, port: int) -> None:
    """Roughly: Redis cuts whole nodes of a hundred."""
    path = tmp_path / "audit.jsonl"
    with running(tmp_path, port) as client, writing(path, port, maxlen=100) as (writer, _):
        offer(writer, range(1, 2001))
        wait(lambda: bool(client.exists(STREAM)) and b'"seq":2000}' in lines(client)[-1])
        assert 100 <= client.xlen(STREAM) < 400
