"""Errors of the mapping."""

from __future__ import annotations


class FieldError(ValueError):
    """A request that can't be mapped.

    Args:
        param: the field.
        code: the error's own code, if any.
        missing: True if the field names something that doesn't exist.
    """

    def __init__(
        self, param: str, message: str, *, code: str | None = None, missing: bool = False
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.missing = missing


class UnreadableError(FieldError):
    """A part that only another provider can read. In a history it is no error."""
