"""The lines that ``leyline serve`` prints once it is up, in front of its logs on a terminal."""

from __future__ import annotations

import io
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from typing import TYPE_CHECKING, BinaryIO, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn

if TYPE_CHECKING:
    from ..settings import Settings


_LONGEST_S = 30.0
"""Time after which logs are shown without a banner: something may hang."""


class HeldOutput(io.TextIOBase):
    """A stream whose text waits for a release. Safe for threads.

    Args:
        stream: gets the text.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._waiting: list[str] | None = []
        # What a finalizer writes may come from within a write.
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        """Write a text, or let it wait."""
        with self._lock:
            if self._waiting is None:
                self.stream.write(text)
            else:
                self._waiting.append(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self.stream.flush()

    def isatty(self) -> bool:
        """Return True if the stream is a terminal."""
        return self.stream.isatty()

    def fileno(self) -> int:
        """Return the stream's descriptor."""
        return self.stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The stream's encoding."""
        return self.stream.encoding

    @property
    def buffer(self) -> BinaryIO:
        """The stream's bytes, which don't wait."""
        return self.stream.buffer

    def release(self) -> None:
        """Write what waits, and give the stream back; later texts wait no more."""
        with self._lock:
            if sys.stderr is self:
                sys.stderr = self.stream
            waiting, self._waiting = self._waiting, None
            if waiting:
                self.stream.write("".join(waiting))
                self.stream.flush()


@contextmanager
def logs_after_banner() -> Iterator[HeldOutput]:
    """Hold what goes to a terminal's stderr, at most for some seconds or until the block ends.

    Yields:
        The held stream; release it once the banner is printed.
    """
    held = HeldOutput(sys.stderr)
    if not held.isatty():  # who collects logs needs no order
        held.release()
        yield held
        return
    timer = threading.Timer(_LONGEST_S, held.release)
    timer.daemon = True
    timer.start()
    try:
        with redirect_stderr(held):
            yield held
    finally:
        timer.cancel()
        held.release()


@contextmanager
def waiting(text: str, terminal: TextIO) -> Iterator[None]:
    """Turn a sign of work on a terminal until the block ends."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"))
    with Progress(
        *columns,
        console=Console(file=terminal),
        transient=True,
        disable=not terminal.isatty(),
        redirect_stdout=False,
        redirect_stderr=False,  # logs wait for the banner
    ) as progress:
        progress.add_task(text, total=None)
        yield


def announce(
    facts: Mapping[str, str],
    sock: socket.socket,
    admin: socket.socket | None,
    settings: Settings,
    held: HeldOutput,
) -> None:
    """Print where to point a client, and facts about the engine; then release the logs.

    Args:
        facts: of :func:`~leyline_proxy.workers.serving.banner_of`.
        sock: the proxy's port.
        admin: the admin port, if there is one.
        held: the logs.
    """
    from ..workers.serving import url_of

    secure = settings.tls_cert is not None
    console = Console(highlight=False, soft_wrap=True)
    verdict = facts["splices"]
    word, colon, obstacle = verdict.partition(":")
    color = "green" if verdict == "yes" else "red"
    shown = {name: escape(fact) for name, fact in facts.items()}
    shown["splices"] = f"[{color}]{word}[/{color}]{colon}{escape(obstacle)}"
    url = url_of(sock, secure=secure)
    lines = {"base_url": f"{url}/v1", **shown, "live page": f"{url}/"}
    if admin is not None:
        lines["admin"] = f"{url_of(admin, secure=secure)}/admin"
    console.print("[bold]Leyline is up.[/bold]")
    for name, value in lines.items():
        console.print(f"  {name:<12} {value}")
    held.release()
