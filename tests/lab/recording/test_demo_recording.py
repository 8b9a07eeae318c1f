"""The shipped demonstration session and the script that records it."""

from __future__ import annotations

import gzip
import json
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import pytest

from leyline_lab.recording.record import (
    SESSION_ID,
    play,
    record,
    recorded_with,
    save,
    write_repo,
)
from leyline_lab.recording.script import (
    TURNS,
    ScriptedTurn,
    bash,
    edit,
    read,
)
from leyline_lab.recording.tools import TOOLS, Workshop, normalise
from leyline_lab.traces.recordings import RecordedSession, read_trace


@pytest.fixture(scope="module")
def shipped() -> RecordedSession:
    """The session as it lies in the package."""
    with as_file(files("leyline_lab.demo").joinpath("session.jsonl.gz")) as path:
        return read_trace(path).sessions[0]


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    """A fresh working copy of the buggy library."""
    made = Workshop(root=tmp_path / "stockroom", binaries=tmp_path / "bin")
    made.install_python()
    write_repo(made.root)
    return made


def test_the_session_is_long_enough(shipped: RecordedSession) -> None:
    """It has more than 30 requests, and a last one of more than 60,000 characters (15K tokens)."""
    assert shipped.id == SESSION_ID and shipped.license == "Apache-2.0"
    assert len(shipped.requests) == len(TURNS) > 30
    assert len(json.dumps(shipped.requests[-1].messages)) > 60_000


def test_it_has_failures_retries_and_a_multi_call_turn(shipped: RecordedSession) -> None:
    """The session shows what an agent's day is like, and ends green."""
    messages = shipped.requests[-1].messages
    results = [str(m["content"]) for m in messages if m["role"] == "tool"]
    assert sum("[exit code:" in text or text.startswith("error:") for text in results) >= 8
    assert any(len(m.get("tool_calls", ())) == 3 for m in messages)
    assert "47 passed" in results[-1] and "14 failed" in results[3]


def test_every_call_is_answered_once(shipped: RecordedSession) -> None:
    """Each tool call has a result of the same id, right after the message that made it."""
    messages = shipped.requests[-1].messages
    called = [c["id"] for m in messages for c in m.get("tool_calls", ())]
    answered = [m["tool_call_id"] for m in messages if m["role"] == "tool"]
    assert called == answered and len(set(called)) == len(called)
    names = {tool["function"]["name"] for tool in TOOLS}
    used = {c["function"]["name"] for m in messages for c in m.get("tool_calls", ())}
    assert used == names


def test_recording_anew_gives_the_shipped_session(tmp_path: Path) -> None:
    """The script makes the shipped record again, byte for byte, under the same versions."""
    with as_file(files("leyline_lab.demo").joinpath("session.jsonl.gz")) as path:
        old = read_record(path)
    if not str(old["notes"]).endswith(recorded_with()):
        pytest.skip(f"recorded with other versions: {old['notes']}")
    save(record(), tmp_path / "new.jsonl")
    assert (tmp_path / "new.jsonl").read_text("utf-8") == json.dumps(old, ensure_ascii=False) + "\n"


def read_record(path: Path) -> dict[str, Any]:
    """The raw record of a packed one-line file."""
    record: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return record


def test_failing_calls_say_so(workshop: Workshop) -> None:
    """Wrong paths, wrong text and failing commands give an error text, not an exception."""
    turns = (
        ScriptedTurn(
            "", (read("nowhere.py"), read("README.md", 900), edit("nowhere.py", "a", "b"))
        ),
        ScriptedTurn("", (edit("README.md", "no such text", ""), bash("exit 3"), bash("true"))),
    )
    messages, held = play(workshop, turns)
    results = [m["content"] for m in messages if m["role"] == "tool"]
    assert held == [2, 6]
    assert results[0] == "error: no such file: nowhere.py"
    assert results[1].startswith("error: README.md has only ")
    assert results[2] == "error: no such file: nowhere.py"
    assert results[3].startswith("error: the old text occurs 0 times in README.md")
    assert results[4:] == ["[exit code: 3]", "(no output)"]


def test_edits_really_change_the_working_copy(workshop: Workshop) -> None:
    """An edit replaces the one occurrence, and an empty old text appends."""
    first = workshop.call("edit", {"path": "README.md", "old": "# stockroom\n", "new": "# x\n"})
    assert first == "README.md: replaced 1 lines at line 1"
    assert workshop.call("edit", {"path": "README.md", "old": "", "new": "end\n"}).endswith(
        "appended"
    )
    text = (workshop.root / "README.md").read_text(encoding="utf-8")
    assert text.startswith("# x\n") and text.endswith("end\n")


def test_normalising_hides_what_differs_between_runs() -> None:
    """Folders, timings, addresses, owners, dates and folder sizes are fixed."""
    root = Path("/var/folders/x1/stockroom")
    raw = (
        "total 12\n"
        "drwxr-xr-x 5 ann staff 160 Jan  1 2020 tests\n"
        "-rw-r--r-- 1 ann staff 7 Jan  1 2020 a.py\n"
        "/var/folders/x1/stockroom/a.py <A at 0x7f0012345678> <B at 0x55aa12345678> "
        "<A at 0x7f0012345678>\n2 passed in 1.37s"
    )
    assert normalise(raw, root) == (
        "total 60\n"
        "drwxr-xr-x 1 dev dev  4096 Mar  3 09:12 tests\n"
        "-rw-r--r-- 1 dev dev     7 Mar  3 09:12 a.py\n"
        "/home/dev/stockroom/a.py <A at 0x7f5a1c002010> <B at 0x7f5a1c002010> "
        "<A at 0x7f5a1c002010>\n2 passed in 0.21s"
    )
