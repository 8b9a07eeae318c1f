"""The three tools of the scripted agent, which really act in its working copy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHOWN_HOME = "/home/dev"
"""The recording's replacement for the temporary folder around the working copy."""

TIMEOUT_S = 60


def _tool(name: str, text: str, required: list[str], **members: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": members, "required": required}
    return {
        "type": "function",
        "function": {"name": name, "description": text, "parameters": parameters},
    }


TOOLS: list[dict[str, Any]] = [
    _tool(
        "bash",
        "Run a shell command in the root of the working copy. Returns standard output and "
        "standard error together; a failing command adds its exit code.",
        ["command"],
        command={"type": "string", "description": "The command line."},
    ),
    _tool(
        "read",
        "Read a text file, with line numbers.",
        ["path"],
        path={"type": "string", "description": "Path relative to the working copy."},
        start={"type": "integer", "description": "First line, from 1."},
        end={"type": "integer", "description": "Last line, included."},
    ),
    _tool(
        "edit",
        "Replace one exact piece of text in a file. The old text must occur exactly once; an "
        "empty old text appends to the file.",
        ["path", "old", "new"],
        path={"type": "string", "description": "Path relative to the working copy."},
        old={"type": "string", "description": "The text to replace, blanks included."},
        new={"type": "string", "description": "The text to put in its place."},
    ),
]


@dataclass(frozen=True, slots=True)
class Workshop:
    """A working copy and the folder that holds the agent's ``python``."""

    root: Path
    binaries: Path

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Execute one tool call and return the output for the agent."""
        handlers: dict[str, Callable[..., str]] = {
            "bash": self._bash,
            "read": self._read,
            "edit": self._edit,
        }
        return normalise(handlers[name](**arguments), self.root)

    def install_python(self) -> None:
        """Make ``python`` in the agent's shell the interpreter that runs this script."""
        self.binaries.mkdir(parents=True, exist_ok=True)
        wrapper = self.binaries / "python"
        wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', encoding="utf-8")
        wrapper.chmod(0o755)

    def _bash(self, command: str) -> str:
        done = subprocess.run(
            ["/bin/bash", "--noprofile", "--norc", "-c", command],
            cwd=self.root,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            check=False,
        )
        text = done.stdout.decode("utf-8", "replace").rstrip("\n")
        if done.returncode:
            return f"{text}\n[exit code: {done.returncode}]".lstrip("\n")
        return text or "(no output)"

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": os.pathsep.join([str(self.binaries), "/usr/local/bin", "/usr/bin", "/bin"]),
            "HOME": str(self.root.parent),
            "LC_ALL": "C.UTF-8",
            "TZ": "UTC",
            "COLUMNS": "80",
            "NO_COLOR": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_ADDOPTS": f"-p no:cacheprovider --basetemp={self.binaries.parent}/pytest",
        }

    def _read(self, path: str, start: int = 1, end: int | None = None) -> str:
        target = self.root / path
        if not target.is_file():
            return f"error: no such file: {path}"
        lines = target.read_text(encoding="utf-8").splitlines()
        picked = list(enumerate(lines, start=1))[start - 1 : end]
        if not picked:
            return f"error: {path} has only {len(lines)} lines"
        return "\n".join(f"{number:>5}  {line}".rstrip() for number, line in picked)

    def _edit(self, path: str, old: str, new: str) -> str:
        target = self.root / path
        if not target.is_file():
            return f"error: no such file: {path}"
        text = target.read_text(encoding="utf-8")
        if not old:
            target.write_text(text + new, encoding="utf-8")
            return f"{path}: {len(new.splitlines())} lines appended"
        found = text.count(old)
        if found != 1:
            return (
                f"error: the old text occurs {found} times in {path}, not once; nothing was "
                "changed. Read the file again: blanks and line ends must match exactly."
            )
        target.write_text(text.replace(old, new), encoding="utf-8")
        line = text[: text.index(old)].count("\n") + 1
        return f"{path}: replaced {len(old.splitlines())} lines at line {line}"


def normalise(text: str, root: Path) -> str:
    """Remove differences between two runs: paths, timings, addresses, owners, versions."""
    text = text.replace(str(root.parent), SHOWN_HOME).replace(sys.executable, "/usr/bin/python")
    text = re.sub(r" in \d+\.\d\ds\b", " in 0.21s", text)
    text = re.sub(r"(?m)^platform \w+ -- .*$", "platform linux", text)
    text = re.sub(r"(?m)^total \d+$", "total 60", text)
    # One address for every object: the reuse of a freed object's memory is random.
    text = re.sub(r"\b0x[0-9a-f]{8,}\b", "0x7f5a1c002010", text)
    return re.sub(r"(?m)^([-dl][-rwx]{9})\.?\s+.*$", _listing_line, text)


def _listing_line(match: re.Match[str]) -> str:
    """Return a line of ``ls -l``, with the owner, the date, and a folder's size fixed."""
    parts = match[0].split(maxsplit=8)
    if len(parts) != 9:
        return match[0]
    kind, size, name = parts[0].rstrip("."), int(parts[4]), parts[8]
    if kind.startswith("d"):
        size = 4096
    return f"{kind} 1 dev dev {size:>5} Mar  3 09:12 {name}"
