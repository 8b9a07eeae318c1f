"""Containment of Leyline's errors where an engine's scheduler calls into Leyline."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


@contextmanager
def contained(doing: str) -> Iterator[None]:
    """Log errors in the block; an exception in the scheduler's loop would end the server.

    Args:
        doing: the action, as in "failed while noting what is published".
    """
    try:
        yield
    except Exception:
        log.exception("Leyline failed while %s", doing)
