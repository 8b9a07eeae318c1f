"""Settings of the audit log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, SecretStr, model_validator

MIB = 1024 * 1024
PLACE = "{instance}"
"""In the name of the file: stands for ``audit_instance``."""


class AuditSettings(BaseModel):
    """The part of the settings that the audit log has."""

    audit_file: Path | None = None
    """The log: edits, forgets and events of claims. ``{instance}`` in its name stands for
    ``audit_instance``; each proxy needs a file of its own."""
    audit_instance: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{0,64}$")] = ""
    """This proxy's name in the log; empty for the host's."""
    audit_key: SecretStr | None = None
    """Seals the log against whoever lacks it, and keys the hashes of texts; without a key, a log
    holds no such hashes."""
    audit_key_file: Path | None = None
    """The same as the first line of a file."""
    audit_turns: Literal["edited", "all"] = "edited"
    """Turns that have a record: those with edits or forgets, or all."""
    audit_max_bytes: Annotated[int, Field(ge=4096)] = 64 * MIB
    """Of one file; then the next one is begun."""
    audit_keep: Annotated[int, Field(ge=0)] = 0
    """Earlier files that are kept; 0 for all."""
    audit_fsync_s: Annotated[float, Field(ge=0.01, le=60)] = 1.0
    """Between two times that what was written is brought to the disk."""
    audit_queue: Annotated[int, Field(ge=1, le=1_000_000)] = 4096
    """Records that may wait for the disk; more are dropped, and the log says how many."""
    audit_redis: SecretStr | None = None
    """URL of a Redis to whose stream each line is added, too: ``redis://`` or ``rediss://``."""
    audit_stream: Annotated[str, Field(min_length=1, max_length=256)] = "leyline:audit"
    """Name of the stream in Redis."""
    audit_stream_maxlen: Annotated[int, Field(ge=1)] = 100_000
    """Entries that the stream keeps, roughly."""

    @model_validator(mode="after")
    def _check_audit(self) -> AuditSettings:
        if self.audit_file is None and (self.audit_redis or self.audit_key or self.audit_key_file):
            raise ValueError("the other settings of the audit log need audit_file")
        if self.audit_key is not None and self.audit_key_file is not None:
            raise ValueError("give the key as audit_key or in audit_key_file, not both")
        return self
