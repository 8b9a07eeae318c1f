"""Settings of the processes that serve, and of their address."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field


class ProcessSettings(BaseModel):
    """The address, the processes and their event loops."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8790
    """0 lets the system choose a free port."""
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that serve the port. They share sessions, limits, the live page, the audit log and
    metrics; an embedded engine has a process of its own."""
    loop: Literal["auto", "asyncio", "uvloop"] = "auto"
    """Event loop: Python's own, or uvloop. ``auto`` uses uvloop if it is installed."""
