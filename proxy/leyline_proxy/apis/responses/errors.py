"""What can be wrong with a request or an answer."""

from __future__ import annotations


class FieldError(ValueError):
    """A request that can't be mapped.

    Args:
        param: the field.
        code: of the error, where it has one of its own.
        missing: whether the field names something that isn't there.
    """

    def __init__(
        self, param: str, message: str, *, code: str | None = None, missing: bool = False
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.missing = missing
