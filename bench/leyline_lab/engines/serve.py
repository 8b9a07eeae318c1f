"""``leyline serve`` as a process of its own on a free port."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import EndpointError
from .process import last_line, started

_ADDRESS = re.compile(r"^\s*base_url\s+(http://\S+)/v1\s*$", re.MULTILINE)
_COMMAND = "from leyline_proxy.cli import main; main()"


@dataclass(frozen=True, slots=True)
class Serving:
    """A process of ``leyline serve``."""

    process: subprocess.Popen[bytes]
    log: Path
    origin: str = ""

    def running(self) -> bool:
        """Return True while the process is there."""
        return self.process.poll() is None

    def check(self, deadline: float) -> None:
        """Raise EndpointError if the process has ended, or a deadline is over."""
        if not self.running():
            status = self.process.returncode
            raise EndpointError(f"leyline serve ended with status {status}: {last_line(self.log)}")
        if time.monotonic() > deadline:
            raise EndpointError(f"leyline serve isn't ready in time; see {self.log}")


@contextmanager
def serving(
    flags: Sequence[str], environment: Mapping[str, str], log: Path, deadline: float
) -> Iterator[Serving]:
    """Run ``leyline serve`` until the end, and yield it once it has an address.

    Args:
        environment: of the process; the only source of settings but for the flags.
        log: file that all its output is appended to.
        deadline: latest time on the monotonic clock.

    Raises:
        EndpointError: it ends, or has no address in time.
        OSError: the log can't be written.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    begins = log.stat().st_size if log.exists() else 0
    command = (sys.executable, "-P", "-c", _COMMAND, "serve", "--port", "0", *flags)
    with started(command, Path.cwd(), environment, log) as process:
        waiting = Serving(process, log)
        while (found := _address(log, begins)) is None:
            waiting.check(deadline)
            time.sleep(0.05)
        yield Serving(process, log, found)


def _address(log: Path, begins: int) -> str | None:
    with log.open("rb") as file:
        file.seek(begins)
        found = _ADDRESS.search(file.read(1024 * 1024).decode(errors="replace"))
    return found[1] if found is not None else None
