"""What can go wrong in a replay, by whose fault it is.

::

    ReplayError            the replay cannot go on; the message says what to do
    ├── StackError         the stack does not start, or answers with a server error
    ├── AccountError       receipt, usage and prompt do not add up: a defect of the stack
    └── MissingExtraError  a library of the extra ``bench`` is not installed
    RequestRefusedError    the stack refused one request; its session ends, the replay goes on
"""

from __future__ import annotations


class ReplayError(Exception):
    """The replay cannot go on."""


class StackError(ReplayError):
    """The stack does not start, or fails on its side."""


class AccountError(ReplayError):
    """The stack's figures for a request contradict one another."""


class MissingExtraError(ReplayError):
    """A library that only measuring needs is not installed."""

    def __init__(self, library: str) -> None:
        super().__init__(f"{library} is not installed; install it with: pip install {library}")


class RequestRefusedError(Exception):
    """The stack refused a request as the client's fault, such as a prompt beyond the context."""
