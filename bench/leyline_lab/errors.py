"""Errors of the laboratory, by whose fault they are.

::

    LabError               the command can't continue; the message gives the fix
    ├── StackError         a stack doesn't start, or answers with a server error
    ├── AccountError       receipt, usage and prompt don't add up: a defect of the stack
    ├── EngineProcessError a server can't be started, or died; gives the end of its log
    ├── ServerAnswerError  a server refused or broke off; has its answer
    ├── TraceError         a file isn't a recording of sessions; names the line and the fault
    ├── SubjectError       a model can't be loaded or measured; names it and the reason
    │   ├── TokenizerError  a folder has no usable tokenizer and chat template
    │   └── NothingCopiedError  an engine copies nothing after an edit
    ├── JournalError       a journal can't be continued or written; names the file and the fix
    ├── UnknownTableError  there is no such table; lists those that exist
    ├── PlanError          options that can't be used, or an output folder of another plan
    ├── MissingError       a checkout, a program or a setting isn't there
    ├── EndpointError      the engine or the proxy in front of it doesn't answer as it must
    ├── BenchmarkError     a benchmark's own command failed or used no model
    └── ResultError        result files aren't in the format of the benchmark's pinned version
    RequestRefusedError    the stack refused one request; its session ends, the replay continues
"""

from __future__ import annotations


class LabError(Exception):
    """An error that ends a command."""


class StackError(LabError):
    """A stack that does not start, or fails on its side."""


class AccountError(LabError):
    """Contradictory figures of the stack for a request."""


class EngineProcessError(LabError):
    """A server that can't be started, or died; the message gives the fix or the end of its log."""


class ServerAnswerError(LabError):
    """A server that refused or broke off; the message has its answer."""


class TraceError(LabError):
    """A file that isn't a recording of sessions; the message names the line and the fault."""


class SubjectError(LabError):
    """A model that can't be loaded or measured; the message names it and the reason."""


class TokenizerError(SubjectError):
    """A folder without a usable tokenizer and chat template; the message names what is missing."""


class NothingCopiedError(SubjectError):
    """An edit after which an engine copies nothing, as too little follows it."""


class JournalError(LabError):
    """A journal that can't be continued or written; the message names the file and the fix."""


class UnknownTableError(LabError):
    """A table that doesn't exist; the message lists those that do."""


class PlanError(LabError):
    """Options that contradict each other or the output folder."""


class MissingError(LabError):
    """Something that must be installed or given first."""


class EndpointError(LabError):
    """An engine or a proxy that doesn't answer as it must."""


class BenchmarkError(LabError):
    """A benchmark's command that failed."""


class ResultError(LabError):
    """Result files that can't be read."""


class RequestRefusedError(Exception):
    """A request that the stack refused as the client's fault, such as an overlong prompt."""
