"""Settings of the processes that serve."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field


class ProcessSettings(BaseModel):
    """The processes and their event loops."""

    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that serve the port. They share sessions, limits, the live page, the audit log and
    metrics; an embedded engine has a process of its own."""
    loop: Literal["auto", "asyncio", "uvloop"] = "auto"
    """Event loop: Python's own, or uvloop. ``auto`` uses uvloop if it is installed."""
