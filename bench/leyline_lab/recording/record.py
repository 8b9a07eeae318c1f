"""Records the demonstration session again: ``python -m leyline_lab.recording.record OUT``.

The agent is scripted, its tools are real: the commands run in a working copy of the small library
of ``repo.txt``, in a temporary folder. Differences between two runs (paths, timings, owners, dates)
are removed, so the same interpreter and pytest give the same bytes.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from .script import SYSTEM, TASK, TURNS, ScriptedTurn
from .tools import TOOLS, Workshop

Message = dict[str, Any]

SESSION_ID = "leyline-demo-stockroom"


def recorded_with() -> str:
    """Return the versions that shape the tools' output."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"Python {python}, pytest {version('pytest')}"


def repo_files() -> dict[str, str]:
    """Return the buggy library: text by path."""
    text = files(__package__).joinpath("repo.txt").read_text(encoding="utf-8")
    parts = re.split(r"(?m)^==> (.+) <==\n", text)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def write_repo(root: Path) -> None:
    """Write the buggy library below ``root``."""
    for path, text in repo_files().items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        target.chmod(0o644)
        target.parent.chmod(0o755)


def play(
    workshop: Workshop, turns: tuple[ScriptedTurn, ...] = TURNS
) -> tuple[list[Message], list[int]]:
    """Play the script; return the conversation and each request's number of messages."""
    messages: list[Message] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": TASK},
    ]
    held: list[int] = []
    identifiers = _identifiers()
    for turn in turns:
        held.append(len(messages))
        answer: Message = {"role": "assistant", "content": turn.say}
        calls = [(next(identifiers), name, arguments) for name, arguments in turn.calls]
        if calls:
            answer["tool_calls"] = [
                {
                    "id": identifier,
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments)},
                }
                for identifier, name, arguments in calls
            ]
        messages.append(answer)
        for identifier, name, arguments in calls:
            result = workshop.call(name, arguments)
            messages.append({"role": "tool", "tool_call_id": identifier, "content": result})
    return messages, held


def record() -> dict[str, Any]:
    """Run the whole session in a temporary folder and return its record."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder).resolve()
        workshop = Workshop(root=home / "stockroom", binaries=home / "bin")
        workshop.install_python()
        write_repo(workshop.root)
        messages, held = play(workshop)
    return {
        "id": SESSION_ID,
        "source": "recorded by leyline_lab.recording.record",
        "license": "Apache-2.0",
        "kind": "coding agent (bash, read and edit tools), scripted, tools really run",
        "model": "scripted",
        "notes": f"append-only; recorded with {recorded_with()}",
        "messages": messages,
        "tools": TOOLS,
        "calls": [{"n": count} for count in held],
    }


def save(session: dict[str, Any], out: Path) -> None:
    """Write one session as ``.jsonl`` or ``.jsonl.gz``, without a time stamp."""
    data = (json.dumps(session, ensure_ascii=False) + "\n").encode()
    if out.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(data)


def _identifiers() -> Iterator[str]:
    number = 0
    while True:
        number += 1
        yield f"call_{number:04d}"


def main() -> int:
    """Run the command line."""
    if len(sys.argv) != 2:
        print("usage: python -m leyline_lab.recording.record OUT.jsonl.gz", file=sys.stderr)
        return 2
    session = record()
    save(session, Path(sys.argv[1]))
    characters = sum(len(json.dumps(message)) for message in session["messages"])
    print(f"{len(session['calls'])} requests, {characters} characters in the last")
    return 0


if __name__ == "__main__":
    sys.exit(main())
