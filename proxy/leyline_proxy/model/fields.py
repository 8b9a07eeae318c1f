"""Fields of a request that the proxy adds, and the error for a wrong one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Literal

import msgspec

from .name_rule import rule_of, texts_at

OPTIONS_FIELD = "leyline"
"""The member of a request's body that holds its options."""

CONTINUE_MEMBER = "continue_final_message"
BEGUN_ANSWER: Mapping[str, bool] = MappingProxyType(
    {CONTINUE_MEMBER: True, "add_generation_prompt": False}
)
"""Members by which SGLang, vLLM and the replay engine continue an answer that the last message
begins."""

_PATH = re.compile(r" - at `(?:key in )?\$(.*)`$")
_NAMED = re.compile(r"matching regex '(.*)'$")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")

SHARE_PATTERN = r"^[A-Za-z0-9._:@/-]{0,128}$"
GROUP_PATTERN = r"^[A-Za-z0-9._:@/-]{1,128}$"
GroupName = Annotated[str, msgspec.Meta(pattern=GROUP_PATTERN)]
ShareName = Annotated[str, msgspec.Meta(pattern=SHARE_PATTERN)]


ToolOrder = Literal["sent", "first"]
"""The order of a request's tools: as they were sent, or as the session had them first."""


class OptionError(ValueError):
    """An option that isn't valid; ``param`` names the field."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def field_error(where: str, text: str, known: Iterable[str], value: object = None) -> OptionError:
    """Return the error for a converter's complaint about a value.

    Args:
        value: what was converted; with it, an error says how a name breaks its rule.
        where: the field that was converted.
        text: the converter's message, which may end in a path below the field.
        known: the members that the value may have.
    """
    path = _PATH.search(text)
    param = where + (path.group(1) if path else "")
    what = _PATH.sub("", text)
    if unknown := _UNKNOWN.search(what):
        names = ", ".join(known)
        return OptionError(
            param, f"{param} has no field {unknown.group(1)[:80]!r}; it may have {names}."
        )
    rule = rule_of(named[1]) if (named := _NAMED.search(what)) else None
    if rule is not None:
        texts = texts_at(value, path.group(1) if path else "")
        broken = next(filter(None, map(rule.broken, texts)), None)
        return OptionError(param, f"{param} {broken or f'may have only {rule.words}'}.")
    return OptionError(param, f"{param}: {what}.")
