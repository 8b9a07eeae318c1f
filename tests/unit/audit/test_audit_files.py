"""The log on the disk: files in turn, crashes, full disks, a second writer."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from audit_kit import KEY, chain_file, counters, event, writer
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.metrics_page import value_of
from support.waiting import wait

from leyline_proxy.audit.chain_file import WriteFailedError
from leyline_proxy.audit.files import AuditError, AuditLockedError, beside, rotated
from leyline_proxy.audit.reading import AuditVerdict, find_logs, records, verify


def checked(path: Path, **options: Any) -> AuditVerdict:
    """The verdict on one log."""
    (log,) = find_logs(path)
    return verify(log, **options)


def kinds(path: Path) -> list[str]:
    """Kinds of all records."""
    return [record["kind"] for record in records(find_logs(path)[0])]


def test_a_log_goes_on_over_restarts(path: Path) -> None:
    """Each start and stop is a record, and the chain doesn't begin again."""
    for number in (1, 2):
        file = chain_file(path, key=KEY)
        file.open()
        file.append([event(number)])
        file.close()
    assert kinds(path) == ["start", "claim", "stop"] * 2
    assert checked(path, keys=[KEY]).good
    assert file.claims == {"run-1": 2}


def test_only_its_owner_reads_a_log(path: Path) -> None:
    """Every file that it consists of is closed to others."""
    file = chain_file(path, max_bytes=4096)
    file.open()
    file.append([event(number) for number in range(40)])
    file.close()
    found = list(path.parent.iterdir())
    assert len(found) >= 5
    assert {entry.stat().st_mode & 0o077 for entry in found} == {0}


def test_files_follow_each_other(path: Path) -> None:
    """No file outgrows its size, the chain runs through all, and each names the one before."""
    file = chain_file(path, max_bytes=4096)
    file.open()
    for number in range(1, 101):
        file.append([event(number)])
    file.close()
    files = [*rotated(path).values(), path]
    assert len(files) > 4
    assert max(entry.stat().st_size for entry in files) < 4096 + 1024
    assert checked(path).good
    own = [record for record in records(find_logs(path)[0]) if record["kind"] == "claim"]
    assert [record["event"]["seq"] for record in own] == list(range(1, 101))
    first = msgspec.json.decode(files[-1].read_bytes().split(b"\n")[0])
    assert (first["kind"], first["before"]["file"]) == ("rotate", files[-2].name)
    assert first["before"]["hash"] == first["prev"]


def test_one_earlier_file_can_be_checked_alone(path: Path) -> None:
    """A file that continued another begins with a record that says so."""
    file = chain_file(path, max_bytes=4096)
    file.open()
    file.append([event(number) for number in range(60)])
    file.close()
    second = rotated(path)[2]
    assert checked(second).good
    second.write_bytes(second.read_bytes().replace(b'"c20"', b'"c21"'))
    assert not checked(path).good


def test_old_files_go_and_the_log_says_so(path: Path) -> None:
    """So many earlier files stay as are asked for; one more that is gone is found."""
    file = chain_file(path, max_bytes=4096, keep=2)
    file.open()
    for number in range(100):
        file.append([event(number)])
    file.close()
    left = rotated(path)
    assert len(left) == 2
    verdict = checked(path)
    assert verdict.good
    assert verdict.checked.first_seq > 1
    every = chain_file(path, max_bytes=4096, keep=0)
    every.open()
    every.append([event(number) for number in range(60)])
    every.close()
    assert len(rotated(path)) > 4
    assert checked(path).good
    next(iter(left.values())).unlink()
    finding = checked(path).finding
    assert finding is not None
    assert finding.damage == "removed"


def test_a_file_that_is_missing_in_the_middle_is_found(path: Path) -> None:
    """The file after it doesn't fit the one before."""
    file = chain_file(path, max_bytes=4096)
    file.open()
    file.append([event(number) for number in range(80)])
    file.close()
    rotated(path)[2].unlink()
    verdict = checked(path)
    assert verdict.finding is not None
    assert (verdict.finding.damage, verdict.file) == ("removed", rotated(path)[3])


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("gone", ["oldest", "all", "renamed"])
def test_removed_files_stay_missing(path: Path, gone: str, restarts: bool) -> None:
    """The files that begin afterwards don't name what is left as all that was kept."""
    file = chain_file(path, max_bytes=4096, key=KEY)
    file.open()
    file.append([event(number) for number in range(80)])
    files = rotated(path)
    for number in files if gone == "all" else (1,):
        files[number].unlink()
    if gone == "renamed":
        for number in list(files)[1:]:
            files[number].rename(files[number - 1])
    if restarts:
        file.close()
        file = chain_file(path, max_bytes=4096, key=KEY)
        file.open()
    for number in range(80, 160):
        file.append([event(number)])
    file.close()
    finding = checked(path, keys=[KEY]).finding
    assert finding is not None
    assert (finding.damage, finding.why) == (
        "removed",
        "earlier files are gone, from number 1 on",
    )
    assert max(rotated(path)) > len(rotated(path))  # no name comes again


@pytest.mark.parametrize("cut", [2, 30, 200])
def test_a_crash_in_the_middle_of_a_line_is_recovered(path: Path, cut: int) -> None:
    """The next start notes what is left of it, and the log is whole and good."""
    file = chain_file(path, key=KEY)
    file.open()
    file.append([event(1)])
    file.sync()
    file.append([event(2)])
    with path.open("r+b") as raw:
        raw.truncate(path.stat().st_size - cut)
    assert checked(path, keys=[KEY]).finding is not None
    crashed(file)
    again = chain_file(path, key=KEY)
    again.open()
    again.append([event(3)])
    again.close()
    assert kinds(path) == ["start", "claim", "recovered", "start", "claim", "stop"]
    verdict = checked(path, keys=[KEY])
    assert verdict.good
    assert verdict.checked.torn == 1


def test_a_line_that_lacks_its_newline_only_is_kept(path: Path) -> None:
    """It is whole; the next start ends it."""
    file = chain_file(path)
    file.open()
    file.append([event(1)])
    with path.open("r+b") as raw:
        raw.truncate(path.stat().st_size - 1)
    crashed(file)
    again = chain_file(path)
    again.open()
    again.close()
    assert kinds(path) == ["start", "claim", "start", "stop"]
    assert checked(path).good


def crashed(file: Any) -> None:
    """Let go of a file as a process does that is killed."""
    os.close(file._descriptor)
    os.close(file._lock)


@given(st.data())
@settings(deadline=None, max_examples=examples(60))
def test_any_crash_is_told_from_any_cut(data: st.DataObject) -> None:
    """A cut is distinguished wherever the file ends when a proxy starts on it: after the bytes
    confirmed to be on the disk it was a crash, and the log is good; before them somebody cut it,
    and the log never is again."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "audit.jsonl"
        file = chain_file(path, key=KEY)
        file.open()
        file.append([event(number) for number in range(3)])
        file.sync()
        confirmed = path.stat().st_size
        file.append([event(number) for number in range(3, 5)])
        crashed(file)
        end = data.draw(st.integers(0, path.stat().st_size))
        with path.open("r+b") as raw:
            raw.truncate(end)
        again = chain_file(path, key=KEY)
        again.open()
        again.append([event(9)])
        again.close()
        # A line that lacks its newline only is whole.
        assert checked(path, keys=[KEY]).good == (end >= confirmed - 1)


def test_a_crash_right_behind_a_rotation_is_recovered(path: Path) -> None:
    """The new file has a torn first line only, or isn't there yet: the chain continues."""
    for left in (b'{"seq":9,"prev', b"", None):
        file = chain_file(path, max_bytes=4096)
        file.open()
        file.append([event(number) for number in range(30)])
        file.sync()
        crashed(file)
        path.rename(path.with_name(f"{path.name}.{len(rotated(path)) + 1:06d}"))
        if left is not None:
            path.write_bytes(left)
    again = chain_file(path, max_bytes=4096)
    again.open()
    again.close()
    verdict = checked(path)
    assert verdict.good, verdict.finding
    assert verdict.checked.torn == 1


def test_a_cut_at_the_end_is_found_by_the_saved_head(path: Path) -> None:
    """It is found even after the proxy was started on the rest."""
    file = chain_file(path)
    file.open()
    file.append([event(1), event(2)])
    file.close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-2]))
    finding = checked(path).finding
    assert finding is not None
    assert finding.damage == "truncated"
    again = chain_file(path)
    again.open()
    again.close()
    finding = checked(path).finding
    assert finding is not None
    assert (finding.damage, finding.line) == ("truncated", 3)


@pytest.mark.parametrize("left", ["lines", "nothing"])
def test_a_cut_before_a_fault_of_the_disk_is_found(path: Path, left: str) -> None:
    """A proxy that opens its file again continues no log that lacks what it has flushed before."""
    file = chain_file(path, key=KEY)
    file.open()
    file.append([event(number) for number in range(1, 9)])
    file.sync()
    beside(path, ".head").unlink()
    if left == "lines":
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:4]))
    else:
        path.unlink()
    assert file._descriptor is not None
    with Path("/dev/full").open("wb") as full:
        os.dup2(full.fileno(), file._descriptor)
    with pytest.raises(WriteFailedError):
        file.append([event(9)])
    file.open()
    file.append([event(10)])
    file.close()
    finding = checked(path, keys=[KEY]).finding
    assert finding is not None
    assert (finding.damage, finding.why[:27]) == ("truncated", "the log ended at record 9 a")


def test_a_head_that_was_noted_elsewhere_must_be_there(path: Path) -> None:
    """A cut of the log and its saved head is found by a hash kept in another place."""
    file = chain_file(path)
    file.open()
    file.append([event(1)])
    noted = file.head.hash
    file.append([event(2)])
    file.close()
    assert checked(path, head=noted).good
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    path.with_name("audit.jsonl.head").unlink()
    assert checked(path).good
    finding = checked(path, head=noted).finding
    assert finding is not None
    assert finding.damage == "truncated"


def test_two_writers_of_one_file_are_refused(path: Path) -> None:
    """The second is sent to a file of its own; when the first has ended, it may use this one."""
    first, second = chain_file(path), chain_file(path)
    first.open()
    with pytest.raises(AuditLockedError, match="own file"):
        second.open()
    first.close()
    second.open()
    second.close()
    assert checked(path).good


def test_a_file_is_claimed_before_the_start(path: Path) -> None:
    """The first to claim a file has it, also before anything was written."""
    first, second = chain_file(path), chain_file(path)
    first.claim()
    with pytest.raises(AuditLockedError):
        second.claim()
    first.open()
    first.close()
    second.claim()
    second.open()
    second.close()
    assert kinds(path) == ["start", "stop"] * 2


def test_another_kind_of_file_is_left_alone(path: Path) -> None:
    """A file that is no log is neither appended to nor overwritten."""
    path.write_text('{"at": "2026", "engine": "e", "seq": 1}\n')
    with pytest.raises(AuditError, match="no audit log"):
        chain_file(path).open()
    assert path.read_text().count("\n") == 1


def test_a_full_disk_costs_records_and_is_told(path: Path) -> None:
    """A write that takes a part leaves a torn line; the log afterwards says what is lost."""
    metrics = counters()
    own = writer(path, metrics=metrics)
    own.start()
    own.offer(lambda: event(1))
    wait(lambda: b'"c1"' in path.read_bytes())
    file = own._file
    broken, target = os.pipe()
    os.close(broken)  # writing fails from now on
    kept, file._descriptor = file._descriptor, target
    with path.open("ab") as raw:
        raw.write(b'{"seq":3,"pr')
    own.offer(lambda: event(2))
    wait(lambda: value_of(metrics.audit_failures) == 1)
    os.close(kept)
    own._retry_at = 0.0
    own.offer(lambda: event(3))
    wait(lambda: b'"c3"' in path.read_bytes())
    own.close(5)
    assert kinds(path) == ["start", "claim", "recovered", "gap", "claim", "stop"]
    verdict = checked(path)
    assert verdict.good, verdict.finding
    assert (verdict.checked.lost, verdict.checked.torn) == (1, 1)


def test_a_disk_that_never_works_costs_no_more_than_the_records(tmp_path: Path) -> None:
    """A folder in place of the file: nothing is raised, everything is counted."""
    metrics = counters()
    own = writer(tmp_path, metrics=metrics)
    own.start()
    for number in range(20):
        own.offer(partial(event, number))
    own.close(5)
    assert value_of(metrics.audit_failures) == 20


def test_a_slow_disk_delays_nobody_and_the_gap_is_in_the_log(path: Path) -> None:
    """More than may wait is dropped at once, and the log says how many."""
    metrics = counters()
    own = writer(path, max_waiting=8, metrics=metrics)
    own.start()
    gate = threading.Event()

    def blocking() -> Any:
        gate.wait(10)
        return event(0)

    own.offer(blocking)
    wait(own._waiting.empty)
    started = time.perf_counter()
    for number in range(1, 101):
        own.offer(partial(event, number))
    assert time.perf_counter() - started < 0.5
    gate.set()
    own.close(5)
    assert kinds(path) == ["start", *["claim"] * 9, "gap", "stop"]
    verdict = checked(path)
    assert (verdict.good, verdict.checked.lost) == (True, 92)
    assert value_of(metrics.audit_failures) == 92


def test_texts_that_wait_are_bounded(path: Path) -> None:
    """Their number is not the only bound: few large ones are dropped, too, but never the only
    one."""
    own = writer(path)
    for number in range(4):
        own.offer(partial(event, number), 40 << 20)
    own.start()
    own.close(5)
    assert kinds(path) == ["start", "claim", "gap", "stop"]


def test_a_record_that_cannot_be_made_does_not_end_the_log(path: Path) -> None:
    """It is counted as lost, and the next one is written."""
    own = writer(path)
    own.start()
    own.offer(lambda: {}["no"])  # type: ignore[arg-type]
    own.offer(lambda: event(2))
    own.close(5)
    assert kinds(path) == ["start", "gap", "claim", "stop"]


def test_everything_that_waits_is_written_at_the_end(path: Path) -> None:
    """A graceful shutdown loses nothing."""
    own = writer(path)
    own.start()
    for number in range(3000):
        own.offer(partial(event, number))
    own.close(30)
    assert kinds(path).count("claim") == 3000
    assert checked(path).good


def test_a_failure_names_what_was_lost(path: Path) -> None:
    """Records that were written whole before the disk failed are none of them."""
    file = chain_file(path)
    file.open()
    read, target = os.pipe()
    os.close(read)
    os.close(file._descriptor)
    file._descriptor = target
    with pytest.raises(WriteFailedError) as raised:
        file.append([event(1), event(2)])
    assert raised.value.lost == 2
    assert not file.is_open
    crashed_lock = file._lock
    assert crashed_lock is not None
    os.close(crashed_lock)
