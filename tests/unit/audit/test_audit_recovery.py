"""A log that failed is written again by itself, and its problem is known meanwhile."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
from audit_kit import chain_file, event, writer
from support.waiting import wait

from leyline_proxy.audit import writer as writing
from leyline_proxy.audit.files import beside, lock
from leyline_proxy.audit.reading import find_logs, records, verify
from leyline_proxy.audit.writer import AuditWriter


def kinds(path: Path) -> list[str]:
    """The kinds of a good log's records."""
    (log,) = find_logs(path)
    assert verify(log).good
    return [each["kind"] for each in records(log)]


@pytest.mark.parametrize("fsync_s", [0.05, 60.0])
def test_a_missing_folder_is_a_problem_until_it_is_there(tmp_path: Path, fsync_s: float) -> None:
    """The log begins soon after its folder exists, although no record comes and no flush is due."""
    path = tmp_path / "later" / "audit.jsonl"
    own = writer(path, fsync_s=fsync_s)
    own.claim()
    own.start()
    try:
        assert own.problem == "it can't be written (No such file or directory)"
        path.parent.mkdir()
        wait(lambda: own.problem is None)
    finally:
        own.close(5)
    assert kinds(path) == ["start", "stop"]


def test_a_head_that_cannot_be_saved_is_a_problem_until_it_can(path: Path) -> None:
    """A file that takes lines isn't enough: what follows can't be flushed, and is a gap."""
    own = writer(path)
    own.start()
    try:
        wait(lambda: beside(path, ".head").exists())
        beside(path, ".head.new").mkdir()  # the draft can't be opened
        own.offer(partial(event, 1))
        wait(lambda: own.problem is not None)
        own.offer(partial(event, 2))
        wait(lambda: own._taken == 2)
        assert own.problem == "it can't be written (Is a directory)"
        beside(path, ".head.new").rmdir()
        wait(lambda: own.problem is None)
    finally:
        own.close(5)
    assert kinds(path) == ["start", "claim", "gap", "stop"]


def test_a_log_that_another_proxy_took_meanwhile_is_a_problem(tmp_path: Path) -> None:
    """The thread lives on, and takes the log once the other has left it."""
    path = tmp_path / "later" / "audit.jsonl"
    own = writer(path)
    own.start()
    try:
        path.parent.mkdir()
        other = lock(path)
        try:
            wait(lambda: own.problem == "it can't be written (it is another proxy's, or no log)")
        finally:
            os.close(other)
        wait(lambda: own.problem is None)
    finally:
        own.close(5)
    assert kinds(path) == ["start", "stop"]


def hang(own: AuditWriter) -> tuple[int, int]:
    """Put a full pipe in place of the log; return its end to read, and the file."""
    source, target = os.pipe()
    os.set_blocking(target, False)
    try:
        while True:
            os.write(target, bytes(65536))
    except BlockingIOError:
        os.set_blocking(target, True)
    kept, own._file._descriptor = own._file._descriptor, target
    assert kept is not None
    return source, kept


def test_a_disk_that_does_not_answer_is_a_problem(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that hangs is noticed long before the queue is full."""
    monkeypatch.setattr(writing, "_HANGS_S", 0.2)
    own = writer(path)
    own.start()
    wait(lambda: not own._file._dirty)  # what is synced is a file
    source, kept = hang(own)
    try:
        assert own.problem is None
        own.offer(partial(event, 1))
        wait(lambda: own.problem == "its disk doesn't answer")
    finally:
        os.close(source)  # the write fails, and the log is opened again
        wait(lambda: own.problem is None)
        own.close(5)
        os.close(kept)
    assert kinds(path) == ["start", "gap", "stop"]


@pytest.mark.parametrize("max_bytes", [1 << 20, 4096])
def test_a_log_that_was_deleted_from_a_folder_is_missed(path: Path, max_bytes: int) -> None:
    """Its saved head, or its earlier files, are still there: the folder isn't good without it. With
    its head it has left on purpose."""
    for name in ("a.jsonl", "b.jsonl"):
        file = chain_file(path.with_name(name), max_bytes=max_bytes)
        file.open()
        file.append([event(number) for number in range(20)])
        file.close()
    path.with_name("a.jsonl").unlink()
    verdicts = [verify(log) for log in find_logs(path.parent)]
    assert [(each.path.name, each.good) for each in verdicts] == [
        ("a.jsonl", False),
        ("b.jsonl", True),
    ]
    assert verdicts[0].finding is not None
    assert verdicts[0].finding.damage == "truncated"
    for each in path.parent.glob("a.jsonl*"):
        each.unlink()
    assert [verify(log).path.name for log in find_logs(path.parent)] == ["b.jsonl"]
