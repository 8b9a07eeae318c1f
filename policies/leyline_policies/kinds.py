"""Types of a policy's settings: how each is read, checked and described."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Union

from leyline_policies.grammar import Value
from leyline_policies.policy import Policy

_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_CONTAINERS: dict[object, Callable[[Iterable[object]], object]] = {
    list: list,
    tuple: tuple,
    set: set,
    frozenset: frozenset,
    Sequence: tuple,
    Collection: tuple,
    Iterable: tuple,
    AbstractSet: frozenset,
}


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of setting. Without ``read`` and ``take`` it can be set from Python only."""

    words: str
    """Its values in words, to follow "... is not"."""
    read: Callable[[Value], object] | None = None
    """Reads a value of the spec language. Raises ValueError."""
    take: Callable[[object], object] | None = None
    """Takes a value that is typed already, without changing its meaning. Raises ValueError."""
    schema: dict[str, Any] | None = None
    holds_patterns: bool = False
    """True if its texts are regular expressions."""


PATTERN = "a regular expression"
Pattern = Annotated[str, PATTERN]
"""Type of a setting that is a regular expression: those of requests are checked."""


def without_none(annotation: Any) -> tuple[Any, bool]:
    """Return an annotation without the None in its union, and True if it had one."""
    if typing.get_origin(annotation) not in (types.UnionType, Union):
        return annotation, False
    members = [each for each in typing.get_args(annotation) if each is not type(None)]
    optional = len(members) < len(typing.get_args(annotation))
    return (members[0] if len(members) == 1 else Union[tuple(members)]), optional  # noqa: UP007


def kind_of(annotation: Any) -> Kind:
    """Return the kind of settings of an annotated type."""
    plain = _without_pattern(annotation)
    kind = _kind_of(plain)
    return kind if plain is annotation else replace(kind, holds_patterns=True)


def _kind_of(annotation: Any) -> Kind:
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    origin, arguments = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if origin is Literal and all(isinstance(each, str) for each in arguments):
        return _choice(arguments)
    if origin is tuple and arguments == (Policy, Ellipsis):
        return POLICIES
    if origin in (types.UnionType, Union):
        return _any_of([kind_of(each) for each in arguments], annotation)
    if origin in _CONTAINERS and set(arguments) <= {str, Ellipsis}:
        return _list(_CONTAINERS[origin])
    return Kind(str(annotation))


def _without_pattern(annotation: Any) -> Any:
    """Return the type with texts for patterns; the very same without any."""
    if annotation == Pattern:
        return str
    if typing.get_origin(annotation) is tuple and Pattern in typing.get_args(annotation):
        return tuple[str, ...]
    return annotation


def _any_of(members: Sequence[Kind], annotation: object) -> Kind:
    """Return the kind of the first member that takes a value; text takes any, so it comes last."""
    ordered = sorted(members, key=lambda member: member is _SCALARS[str])
    reads = [member.read for member in ordered if member.read is not None]
    takes = [member.take for member in ordered if member.take is not None]
    schemas = [member.schema for member in ordered if member.schema is not None]
    if len(reads) < len(ordered):
        return Kind(str(annotation))
    words = " or ".join(member.words for member in ordered)
    return Kind(words, _first(reads), _first(takes), {"anyOf": schemas})


def _first(converters: Sequence[Callable[[Any], object]]) -> Callable[[Any], object]:
    def convert(value: object) -> object:
        for each in converters:
            try:
                return each(value)
            except ValueError:
                continue
        raise ValueError(value)

    return convert


def _list(
    container: Callable[[Iterable[object]], object], words: str = "a list such as [a;b]"
) -> Kind:
    def take(value: object) -> object:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple | set | frozenset):
            raise ValueError(value)
        return container([_text(item) for item in items])

    texts = {"type": "array", "items": {"type": "string"}}
    return Kind(
        words,
        lambda value: container(_strings(value)),
        take,
        {"anyOf": [texts, {"type": "string"}]},
    )


def _strings(value: Value) -> Sequence[str]:
    if value.items is not None and not value.quoted:
        return value.items
    return (value.text,) if value.text or value.quoted else ()


def _choice(choices: Sequence[str]) -> Kind:
    def take(value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ValueError(value)
        return value

    words = f"one of {', '.join(choices)}"
    return Kind(words, lambda value: take(value.text), take, {"enum": list(choices)})


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    return value


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(value)
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(value)
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError(value) from error
    if not math.isfinite(number):
        raise ValueError(value)
    return number


def _truth(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(value)
    return value


def _bool(value: Value) -> bool:
    try:
        return _BOOLEANS[value.text.lower()]
    except KeyError as error:
        raise ValueError(value.text) from error


_SCALARS: dict[object, Kind] = {
    str: Kind("text", lambda value: value.text, _text, {"type": "string"}),
    int: Kind("a whole number", lambda value: int(value.text), _whole, {"type": "integer"}),
    float: Kind("a number", lambda value: _number(float(value.text)), _number, {"type": "number"}),
    bool: Kind("true or false", _bool, _truth, {"type": "boolean"}),
}

POLICIES = _list(tuple, "a list of specs such as ['prune';'sliding_window:max_tokens=9000']")
"""Policies inside another (``tuple[Policy, ...]``): read as specs, of which
`leyline_policies.spec.build_policy` makes policies."""
