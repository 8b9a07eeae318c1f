"""The forms of log lines: for people on a terminal, for machines elsewhere."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest

_LOG = (
    "import structlog\n"
    "from leyline_proxy.telemetry.logging import configure_logging\n"
    "configure_logging('info', {style!r})\n"
    "structlog.get_logger('leyline.test').info('hello', count=3)\n"
)


def logged(style: str, *, terminal: bool) -> str:
    """The line that a process logs to a terminal, or to a pipe."""
    command = [sys.executable, "-c", _LOG.format(style=style)]
    if not terminal:
        return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr
    ours, theirs = pty.openpty()
    try:
        subprocess.run(command, stderr=theirs, check=True)
        return os.read(ours, 4096).decode()
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize(
    ("style", "terminal", "machines"),
    [
        ("auto", True, False),
        ("auto", False, True),
        ("json", True, True),
        ("console", False, False),
    ],
)
def test_people_read_terminals(style: str, terminal: bool, machines: bool) -> None:
    """By default a terminal shows lines for people, and a pipe gets an object per line."""
    line = logged(style, terminal=terminal)
    assert "hello" in line
    if machines:
        assert json.loads(line)["count"] == 3
    else:
        with pytest.raises(ValueError, match=r"Expecting|Extra"):
            json.loads(line)
