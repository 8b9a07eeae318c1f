"""Errors of the harness, by whose fault they are.

::

    OutsideError           the command can't continue; the message is one line and gives the fix
    ├── PlanError          options that can't be used, or an output folder of another plan
    ├── MissingError       a checkout, a program or a setting isn't there
    ├── EndpointError      the engine or the proxy in front of it doesn't answer as it must
    ├── BenchmarkError     the benchmark's own command failed or used no model
    └── ResultError        the benchmark's result files aren't in the format of its pinned version
"""

from __future__ import annotations


class OutsideError(Exception):
    """An error that ends the command."""


class PlanError(OutsideError):
    """Options that contradict each other or the output folder."""


class MissingError(OutsideError):
    """Something that must be installed or given first."""


class EndpointError(OutsideError):
    """An engine or a proxy that doesn't answer as it must."""


class BenchmarkError(OutsideError):
    """A benchmark's command that failed."""


class ResultError(OutsideError):
    """Result files that can't be read."""
