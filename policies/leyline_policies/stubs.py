"""Addresses of evicted texts, and the lines that show them to a model.

A stub takes little room, and says what is gone and how it is found again::

    [evicted: bash output, 2,314 tokens, sha256:6ae8a75555209fd6c44157c0aed8016e]
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

_DIGITS = 32
_LONGEST_NAME = 64
_RESULT_ROLES = ("tool", "function")
_UNFIT = re.compile(r"[^\w.:/-]+")

ADDRESS = re.compile(rf"(?<!\w)sha256:[0-9a-f]{{{_DIGITS}}}(?!\w)")
"""An address in a text. A whole SHA-256 digest, such as an image's, is none."""

_STUB = re.compile(
    r"\[evicted: (?P<what>[\w.:/-]{1,64} output|(?:user|assistant|system) message|[\d,]{1,12} "
    rf"messages), (?P<tokens>\d[\d,]{{0,14}}) tokens, (?P<address>{ADDRESS.pattern})\]"
)


@dataclass(frozen=True, slots=True)
class Evicted:
    """A part: a text that a policy evicted, by its address."""

    address: str
    text: str = field(repr=False)
    role: str
    """Role of the message that had it; empty for a run of several messages."""
    tool: str
    """Name of the tool whose result it is; empty if it is none's."""
    tokens: int
    """Approximate number of its tokens."""
    policy: str
    tags: tuple[str, ...] = ()
    """Tags of the message, or of any in the run."""
    messages: int = 1
    """Number of messages that it holds the text of."""
    sources: tuple[str, ...] = ()
    """Addresses of these messages' whole texts, before and after each edit since a forget."""

    @property
    def stub(self) -> str:
        """The line in a message that shows its address."""
        return f"[evicted: {self._what}, {self.tokens:,} tokens, {self.address}]"

    @property
    def _what(self) -> str:
        if self.messages != 1:
            return f"{self.messages:,} messages"
        if self.role in _RESULT_ROLES:
            return f"{_UNFIT.sub('_', self.tool)[:_LONGEST_NAME] or 'tool'} output"
        return f"{self.role if self.role in ('user', 'assistant') else 'system'} message"


@dataclass(frozen=True, slots=True)
class Stub:
    """A stub line as it stands in a message."""

    what: str
    """``bash output``, ``user message``, ``12 messages``."""
    tokens: int
    address: str


def address_of(text: str) -> str:
    """Return the address of a text: ``sha256:`` and the first 32 digits of its SHA-256.

    The digest is that of the text in UTF-8, with lone surrogates encoded like any character.
    """
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"sha256:{digest[:_DIGITS]}"


def stubs_in(text: str) -> tuple[Stub, ...]:
    """Return the stubs in a text, in order.

    A text may imitate stubs: only the store of a session knows which addresses are real.
    """
    found = _STUB.finditer(text) if "[evicted: " in text else ()
    return tuple(
        Stub(each["what"], int(each["tokens"].replace(",", "")), each["address"]) for each in found
    )


def stub_lines(parts: Sequence[Evicted]) -> str:
    """Return the stubs of parts, each on a line."""
    return "\n".join(part.stub for part in parts)
