"""The flag of a process that must stop."""

from __future__ import annotations


class Shutdown:
    """Shutdown flag. The server sets it once; connections and ``/readyz`` are among its readers."""

    def __init__(self) -> None:
        self.begun = False
