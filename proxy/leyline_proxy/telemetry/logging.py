"""Structured logs on stderr."""

from __future__ import annotations

import io
import logging
import sys
import traceback
from contextlib import suppress
from typing import TextIO, cast

import structlog

from .tracing import current_trace


def frames_of(error: BaseException) -> list[str]:
    """Return the origin of ``error``: file, line and function, innermost last.

    The message of a foreign exception may quote prompt text, so logs hold only its frames.
    """
    frames = traceback.extract_tb(error.__traceback__)
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]


def _add_trace_id(
    logger: structlog.typing.WrappedLogger, method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Add the trace of the line's request, if requests are traced."""
    if (trace_id := current_trace().trace_id) is not None:
        event["trace_id"] = trace_id
    return event


def _without_none(
    logger: structlog.typing.WrappedLogger, method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Drop members that say nothing to a reader."""
    return {name: value for name, value in event.items() if value is not None}


class Stderr(io.TextIOBase):
    """The current value of ``sys.stderr``. A line that can't be written is lost: a full disk must
    end neither a request nor a thread."""

    def write(self, text: str) -> int:
        """Write a text, in one piece: workers write to the same place."""
        with suppress(OSError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        """Hand on what waits."""
        with suppress(OSError):
            sys.stderr.flush()


class StderrHandler(logging.Handler):
    """Writes to :class:`Stderr`."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        Stderr().write(self.format(record) + "\n")


def configure_logging(level: str, style: str) -> None:
    """Send structlog and the standard library's logs to stderr, as JSON lines or for a console.

    Only commands call this: a library that hosts the application keeps its own logging.

    Args:
        style: ``json``, ``console``, or ``auto``: a console's if stderr is a terminal.
    """
    threshold = logging.getLevelNamesMapping()[level.upper()]
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        _add_trace_id,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    for_people = style == "console" or (style == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
    if for_people:
        processors.append(_without_none)
        renderer = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(),
            # Rich tracebacks show local variables, which may hold prompts.
            exception_formatter=structlog.dev.plain_traceback,
        )
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=lambda *_: structlog.WriteLogger(cast(TextIO, Stderr())),
        cache_logger_on_first_use=False,
    )
    handler = StderrHandler()
    handler.setLevel(threshold)  # loggers of libraries have levels of their own
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=processors,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    for old in [item for item in root.handlers if isinstance(item, StderrHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(threshold)
    # A line per upstream request would repeat the proxy's own turn line; the server's lines about a
    # start would repeat the banner.
    for noisy in ("httpx", "httpcore", *(("uvicorn.error",) if for_people else ())):
        logging.getLogger(noisy).setLevel(logging.WARNING)
