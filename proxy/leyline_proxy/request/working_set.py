"""The option ``leyline.context``: the texts that a request needs in its prompt, or excludes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

import msgspec

from ..model.fields import OPTIONS_FIELD, OptionError
from ..model.working_set import ADDRESS_DIGITS, ADDRESS_PREFIX, Selector, SelectorKind

CONTEXT_OPTION = f"{OPTIONS_FIELD}.context"
MAX_SELECTORS = 256
MAX_NAME = 128
"""Longest name of a tag or tool in a selector, in characters."""

_MAX_BUDGET = 2**31 - 1
_ADDRESS = re.compile(rf"{ADDRESS_PREFIX}([0-9a-fA-F]{{12,64}})")
_NAMED: tuple[SelectorKind, ...] = ("tag", "tool")
_FIX = (
    f"a selector is `{ADDRESS_PREFIX}` and 12 to 64 hex digits, `tag:NAME` or `tool:NAME`, with a "
    f"printable NAME of 1 to {MAX_NAME} characters"
)

_Selectors = Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_SELECTORS)]


class ContextOption(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The working set of a request."""

    need: _Selectors = ()
    """Selectors of texts to have in the prompt, the most important first."""
    exclude: _Selectors = ()
    """Selectors of texts to keep out of it."""
    budget_tokens: Annotated[int, msgspec.Meta(ge=0, le=_MAX_BUDGET)] | None = None
    """Most tokens to bring back; None for the proxy's limit."""

    @property
    def needed(self) -> tuple[Selector, ...]:
        """``need``, read. Raises OptionError for a selector that is none."""
        return tuple(_selectors("need", self.need))

    @property
    def excluded(self) -> tuple[Selector, ...]:
        """``exclude``, read. Raises OptionError for a selector that is none."""
        return tuple(_selectors("exclude", self.exclude))


def check_context(option: ContextOption) -> None:
    """Check the selectors.

    Raises:
        OptionError: names the first that is wrong, as in ``leyline.context.need[2]``.
    """
    for name, texts in (("need", option.need), ("exclude", option.exclude)):
        for _ in _selectors(name, texts):
            pass


def read_selector(text: str) -> Selector | None:
    """Return the selector that a text is; None if it is none."""
    address = _ADDRESS.fullmatch(text)
    if address is not None:
        return Selector("address", ADDRESS_PREFIX + address[1][:ADDRESS_DIGITS].lower())
    for kind in _NAMED:
        name = text.removeprefix(f"{kind}:")
        if name != text and 1 <= len(name) <= MAX_NAME and name.isprintable():
            return Selector(kind, name)
    return None


def _selectors(name: str, texts: tuple[str, ...]) -> Iterator[Selector]:
    for number, text in enumerate(texts):
        selector = read_selector(text)
        if selector is None:
            where = f"{CONTEXT_OPTION}.{name}[{number}]"
            raise OptionError(where, f"{where}: {_FIX}.")
        yield selector
