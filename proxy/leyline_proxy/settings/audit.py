"""Settings of the audit log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, SecretStr, model_validator

MIB = 1024 * 1024
PLACE = "{instance}"
"""Placeholder in the file's name: replaced by ``audit_instance``."""


class AuditSettings(BaseModel):
    """The settings of the audit log."""

    audit_file: Path | None = None
    """The log of edits, forgets and events of claims. ``{instance}`` in its name is replaced by
    ``audit_instance``; each proxy needs its own file."""
    audit_instance: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{0,64}$")] = ""
    """This proxy's name in the log; if empty, the host's name."""
    audit_key: SecretStr | None = None
    """Key that seals the log against anyone without it, and that keys the hashes of texts. Without
    a key, a log holds no such hashes."""
    audit_key_file: Path | None = None
    """File whose first line is this key."""
    audit_turns: Literal["edited", "all"] = "edited"
    """Turns that get a record: turns with edits or forgets, or all turns."""
    audit_max_bytes: Annotated[int, Field(ge=4096)] = 64 * MIB
    """Size of one file, after which the next one starts."""
    audit_keep: Annotated[int, Field(ge=0)] = 0
    """Number of earlier files to keep; 0 for all."""
    audit_fsync_s: Annotated[float, Field(ge=0.01, le=60)] = 1.0
    """Time between two syncs of the log to disk."""
    audit_queue: Annotated[int, Field(ge=1, le=1_000_000)] = 4096
    """Records that may wait for the disk. Further ones are dropped, and the log counts them."""
    audit_on_fault: Literal["serve", "refuse"] = "serve"
    """Requests that change something while the log can't be written: ``serve`` counts what the log
    lacks, ``refuse`` answers 503 until it can be written again."""
    audit_redis: SecretStr | None = None
    """URL of a Redis whose stream also gets each line: ``redis://`` or ``rediss://``."""
    audit_stream: Annotated[str, Field(min_length=1, max_length=256)] = "leyline:audit"
    """Name of the stream in Redis."""
    audit_stream_maxlen: Annotated[int, Field(ge=1)] = 100_000
    """Approximate number of entries that the stream keeps."""

    @model_validator(mode="after")
    def _check_audit(self) -> AuditSettings:
        if self.audit_file is None and (self.audit_redis or self.audit_key or self.audit_key_file):
            raise ValueError("the other settings of the audit log need audit_file")
        if self.audit_file is None and self.audit_on_fault == "refuse":
            raise ValueError("audit_on_fault: refuse needs audit_file")
        if self.audit_key is not None and not self.audit_key.get_secret_value():
            raise ValueError("audit_key is empty, so the log would be sealed by nothing")
        if self.audit_key is not None and self.audit_key_file is not None:
            raise ValueError("give the key as audit_key or in audit_key_file, not both")
        return self
