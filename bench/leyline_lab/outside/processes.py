"""Commands of a run, each in a process group of its own that ends as a whole."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import BenchmarkError

_STOP_S = 30.0
_POLL_S = 0.1


@contextmanager
def started(
    arguments: Sequence[str], cwd: Path, environment: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command with all output appended to a log, and end it with everything it started.

    Raises:
        BenchmarkError: there is no such program or folder.
        OSError: the log can't be written.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        try:
            process = subprocess.Popen(
                arguments,
                cwd=cwd,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise BenchmarkError(f"{arguments[0]} can't be run: {error.strerror}") from error
    try:
        yield process
    finally:
        _end(process)


def wait(process: subprocess.Popen[bytes], tick: Callable[[], None]) -> int:
    """Wait for the end of a process and return its status; call ``tick`` again and again."""
    while (status := process.poll()) is None:
        tick()
        time.sleep(_POLL_S)
    return status


def last_line(log: Path) -> str:
    """Return the last line of a log that isn't empty, cut to 200 characters."""
    with suppress(OSError):
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 8192))
            lines = file.read().decode(errors="replace").splitlines()
        for line in reversed(lines):
            if line.strip():
                return line.strip()[:200]
    return "it printed nothing"


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
    # Processes that outlive the command are still in its group.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_STOP_S)
