"""Whether the process has been told to stop."""

from __future__ import annotations


class Shutdown:
    """Set once, by the server; read by whoever tells others, and by each connection."""

    def __init__(self) -> None:
        self.begun = False
