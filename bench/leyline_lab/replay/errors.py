"""Errors of a replay, by whose fault they are.

::

    ReplayError            the replay cannot continue; the message gives the fix
    ├── StackError         the stack does not start, or answers with a server error
    ├── AccountError       receipt, usage and prompt do not add up: a defect of the stack
    └── MissingExtraError  a library of the extra ``bench`` is not installed
    RequestRefusedError    the stack refused one request; its session ends, the replay continues
"""

from __future__ import annotations


class ReplayError(Exception):
    """An error that ends the replay."""


class StackError(ReplayError):
    """The stack does not start, or fails on its side."""


class AccountError(ReplayError):
    """Contradictory figures of the stack for a request."""


class MissingExtraError(ReplayError):
    """A missing library that only measuring needs."""

    def __init__(self, library: str) -> None:
        super().__init__(f"{library} is not installed; install it with: pip install {library}")


class RequestRefusedError(Exception):
    """A request that the stack refused as the client's fault, such as an overlong prompt."""
