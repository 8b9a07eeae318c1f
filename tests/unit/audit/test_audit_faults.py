"""A log that is damaged or being written: its report stays true and readable."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import pytest
from audit_kit import chain_file, counters, event, writer
from support.metrics_page import value_of
from support.waiting import wait
from typer.testing import CliRunner

from leyline_proxy.audit import reading
from leyline_proxy.audit.chain import Head, seal
from leyline_proxy.audit.reading import find_logs, records, verify
from leyline_proxy.audit.writer import AuditWriter
from leyline_proxy.cli.main import build_app


def fail_disk(own: AuditWriter) -> None:
    """Writing fails from now on, until the file is opened again."""
    read, target = os.pipe()
    os.close(read)
    kept, own._file._descriptor = own._file._descriptor, target
    assert kept is not None
    os.close(kept)


def test_each_lost_record_is_counted_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log and the metric give the number of lost records, however often the disk fails."""
    metrics = counters()
    own = writer(path, metrics=metrics)
    own.start()
    fail_disk(own)
    opened = own._file.open

    def opens_and_fails() -> None:
        opened()
        fail_disk(own)

    monkeypatch.setattr(own._file, "open", opens_and_fails)
    for number in range(1, 4):
        own._retry_at = 0.0
        own.offer(partial(event, number))
        wait(lambda number=number: own._taken == number)
        wait(lambda: own._retry_at > time.monotonic())
    monkeypatch.setattr(own._file, "open", opened)
    own.offer(partial(event, 4))
    own.close(5)
    assert b'"c4"' in path.read_bytes()
    (log,) = find_logs(path)
    assert (verify(log).good, verify(log).checked.lost) == (True, 3)
    assert value_of(metrics.audit_failures) == 3


def test_a_loss_is_told_without_another_record(path: Path) -> None:
    """It is reported when the disk works again, and at the latest when the proxy ends."""
    metrics = counters()
    own = writer(path, metrics=metrics)
    own.start()
    fail_disk(own)
    own.offer(lambda: event(1))
    wait(lambda: value_of(metrics.audit_failures) == 1)
    own.close(5)
    assert [each["kind"] for each in records(find_logs(path)[0])] == ["start", "gap", "stop"]


def test_a_log_that_is_rotated_while_it_is_read_is_good(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are looked up again: a file that has moved meanwhile isn't missing."""
    file = chain_file(path, max_bytes=4096)
    file.open()
    file.append([event(number) for number in range(1, 40)])
    (log,) = find_logs(path)
    assert len(log.files) > 1
    original = reading._settled

    def rotating(each: Path) -> bytes:
        monkeypatch.setattr(reading, "_settled", original)
        file.append([event(number) for number in range(40, 80)])
        return original(each)

    monkeypatch.setattr(reading, "_settled", rotating)
    verdict = verify(log)
    file.close()
    assert verdict.good, verdict.finding


def shown(path: Path, *options: str) -> tuple[int, str]:
    """Return the output of ``leyline audit show`` for a log."""
    result = CliRunner().invoke(build_app(), ["audit", "show", str(path), *options])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


def write(path: Path, *members: dict[str, object]) -> None:
    """A whole log of such records."""
    head, lines = Head(), []
    for each in members:
        line, head = seal(head, each, None)
        lines.append(line)
    path.write_bytes(b"".join(lines))


def edited(**changes: object) -> dict[str, object]:
    """The record of a turn with one edit, of which something was changed."""
    edit = {
        "message": 1,
        "role": "tool",
        "cause": "policy:p",
        "mode": "amortize",
        "removed_tokens": 4,
        "inserted_tokens": 2,
        "sent_before": True,
        "names": [],
    }
    record: dict[str, object] = {
        "time": "2026-01-01T00:00:00.000Z",
        "kind": "turn",
        "status": "settled",
        "tenant": "red",
        "session": "s",
        "turn": "t1",
        "index": 1,
        "message_id": "m",
        "engine": "e",
        "planned": "spliced",
        "outcome": "spliced",
        "receipt": True,
        "forgot": None,
        "forget": [],
        "edits": [edit],
    }
    return {
        **record,
        **{key: value for key, value in changes.items() if key in record},
        "edits": changes.get("edits", [{**edit, **changes}]),
    }


@pytest.mark.parametrize("json", [(), ("--json",)])
@pytest.mark.parametrize(
    "broken",
    [
        {"kind": "turn"},
        {"kind": "receipt", "forgot": {}},
        {"kind": "erasure"},
        edited(edits=[{}]),
        edited(edits=7),
        edited(forget=None),
        edited(message_id=[]),
    ],
)
def test_records_that_cannot_be_read_do_not_hide_the_others(
    path: Path, broken: dict[str, object], json: tuple[str, ...]
) -> None:
    """A writer to the file can't keep the rest of it from being shown."""
    write(path, {"kind": "start"}, broken, edited())
    _, output = shown(path, *json)
    assert "amortized" in output


def test_what_is_shown_moves_no_cursor(path: Path) -> None:
    """Control characters and markup in a log are shown as such, and do nothing to the terminal."""
    write(
        path,
        {"kind": "start"},
        edited(session="\x1b]0;x\x07", role="\x9b2J", cause="[/red]\x1b[1A", mode="[/x]"),
    )
    _, output = shown(path)
    assert not {"\x1b", "\x07", "\x9b"} & set(output)
