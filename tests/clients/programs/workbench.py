"""The common part of all programs here: two tools that really act, and the server's address."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ORIGIN = os.environ["ORIGIN"]
"""Of the server, without ``/v1``."""
MODEL = os.environ["MODEL"]
TASK = os.environ["TASK"]
KEY = os.environ["KEY"]
SYSTEM = (
    "You are a careful agent in a folder of a user. You write files and run commands, one after "
    "the other, and look at what came of them before you go on."
)


def write_file(path: str, content: str) -> str:
    """Write a text file.

    Args:
        path: name of the file.
        content: all of its text.
    """
    Path(path).write_text(content, encoding="utf-8")
    return f"{len(content)} characters written to {path}"


def run_command(command: str) -> str:
    """Run a shell command and give what it prints.

    Args:
        command: as a shell takes it.
    """
    ran = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=30, check=False
    )
    return f"exit status {ran.returncode}\n{ran.stdout}{ran.stderr}"


TOOLS = {tool.__name__: tool for tool in (write_file, run_command)}


def schema(*names: str) -> dict[str, object]:
    """A JSON schema of string members."""
    members = {name: {"type": "string"} for name in names}
    return {"type": "object", "properties": members, "required": list(names)}


SCHEMAS = {
    "write_file": schema("path", "content"),
    "run_command": schema("command"),
}
