"""What a request or an operator may say about edits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from .declared import DeclaredEdit

FIELD = "leyline"
UNDECLARED_KEYS = ("tool", "user", "assistant", "system", "template")
UNDECLARED_MODES = ("exact", "amortize")

_PATH = re.compile(r" - at `(?:key in )?\$(.*)`$")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")


class OptionError(ValueError):
    """An option that can't be understood; ``param`` names the field."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


Trust = Literal["name", "opening", "messages"]
"""Why a turn of a session counts as one of the conversation that goes on with it.

name
    The caller names its session.
opening
    A harness gives one name to all that it does for a task: a turn is of this conversation where
    the list has the turn's task and first answer.
messages
    Nothing but what the list shows. Whoever sends the same is in the session, so no KV may remember
    more than that, and the caller's own edits are exact.
"""


@dataclass(frozen=True, slots=True)
class UndeclaredRules:
    """Whose undeclared edits are amortised; everything else is exact."""

    roles: frozenset[str] = frozenset()
    """Subset of ``UNDECLARED_KEYS``."""
    trust: Trust = "name"
    """Whose word it is that an earlier turn is of this conversation."""

    @classmethod
    def parse(cls, items: Mapping[str, str] | Iterable[str]) -> UndeclaredRules:
        """Rules from a mapping or from ``role=mode`` items.

        Raises:
            OptionError: an item without ``=``, an unknown role or an unknown mode.
        """
        pairs = items.items() if isinstance(items, Mapping) else [_split(item) for item in items]
        roles: set[str] = set()
        param = f"{FIELD}.undeclared"
        for role, mode in pairs:
            if role not in UNDECLARED_KEYS:
                known = ", ".join(UNDECLARED_KEYS)
                raise OptionError(param, f"undeclared: unknown role {role[:80]!r}; known: {known}.")
            if mode not in UNDECLARED_MODES:
                known = " or ".join(UNDECLARED_MODES)
                raise OptionError(f"{param}.{role}", f"undeclared: {role} must be {known}.")
            roles.discard(role)
            if mode == "amortize":
                roles.add(role)
        return cls(frozenset(roles))

    def amortizes(self, role: str) -> bool:
        """Whether an undeclared edit of a message of ``role`` (or ``template``) is amortised."""
        return self.trust == "name" and self._has(role)

    def withholds(self, role: str) -> bool:
        """Whether it would be, did the session have a certain name."""
        return self.trust != "name" and self._has(role)

    def _has(self, role: str) -> bool:
        return {"developer": "system", "function": "tool"}.get(role, role) in self.roles


def _split(item: str) -> tuple[str, str]:
    role, separator, mode = item.partition("=")
    if not separator:
        raise OptionError(
            f"{FIELD}.undeclared", f"undeclared: {item[:80]!r} must have the form role=mode."
        )
    return role.strip(), mode.strip()


SHARE_PATTERN = r"^[A-Za-z0-9._:@/-]{0,128}$"
ShareName = Annotated[str, msgspec.Meta(pattern=SHARE_PATTERN)]


class RequestOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body field ``leyline`` of a request."""

    policy: str | None = None
    undeclared: dict[str, str] = {}
    edits: list[DeclaredEdit] = []
    boundary: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0
    """Tokens behind each edit to compute anew."""
    share: ShareName | None = None
    """Scope within the tenant that may see what this turn splices; empty for nobody else."""


def parse_options(raw: object) -> RequestOptions:
    """Options of a request; None means none were given.

    Raises:
        OptionError: naming the field, as in ``leyline.edits[0].message``.
    """
    if raw is None:
        return RequestOptions()
    if not isinstance(raw, dict):
        raise OptionError(FIELD, f"{FIELD} must be an object.")
    try:
        options = msgspec.convert(raw, RequestOptions)
    except msgspec.ValidationError as error:
        raise _option_error(str(error)) from error
    UndeclaredRules.parse(options.undeclared)
    for index, edit in enumerate(options.edits):
        _check_edit(f"{FIELD}.edits[{index}]", edit)
    return options


def _option_error(text: str) -> OptionError:
    struct = DeclaredEdit if ".edits[" in text else RequestOptions
    return field_error(FIELD, text, struct.__struct_fields__)


def field_error(where: str, text: str, known: Iterable[str]) -> OptionError:
    """The error for what a converter says of a value.

    Args:
        where: the field that was converted.
        text: the converter's words, which may end in a path below it.
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
    return OptionError(param, f"{param}: {what}.")


def _check_edit(where: str, edit: DeclaredEdit) -> None:
    if edit.message < 0:
        raise OptionError(f"{where}.message", f"{where}.message must not be negative.")
    if edit.drop and (edit.chars is not None or edit.replacement is not None):
        raise OptionError(
            f"{where}.drop", f"{where}.drop removes the whole message; leave out the other fields."
        )
    if edit.chars is None:
        return
    start, end = edit.chars
    if not 0 <= start <= end:
        raise OptionError(
            f"{where}.chars", f"{where}.chars must be [start, end], 0 <= start <= end."
        )
    if edit.replacement is None:
        raise OptionError(
            f"{where}.replacement",
            f'{where}.replacement must be the text for these chars; "" deletes them.',
        )
