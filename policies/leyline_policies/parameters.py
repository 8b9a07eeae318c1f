"""The settings that a policy takes, read from its constructor's (or function's) signature."""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal, Union

from leyline_policies.errors import SpecError, did_you_mean, shown
from leyline_policies.grammar import Value

REQUIRED: Any = inspect.Parameter.empty
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_CONTAINERS: dict[object, Callable[[Iterable[str]], object]] = {
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
class Parameter:
    """One setting: its name, what values it takes in words, its default and its converter."""

    name: str
    kind: str
    optional: bool
    default: object
    read: Callable[[Value], object] | None

    @property
    def required(self) -> bool:
        """Whether a spec must give it."""
        return self.default is REQUIRED

    def convert(self, value: Value) -> object:
        """The Python value of what was written.

        Raises ValueError with the words that follow "key=value" in the message.
        """
        if self.optional and not value.quoted and value.text.lower() == "none":
            return None
        if self.read is None:
            raise ValueError(f"can't be set in a spec: its type is {self.kind}")
        try:
            return self.read(value)
        except ValueError as error:
            raise ValueError(f"is not {self.kind}") from error


def read_parameters(target: Callable[..., object], *, skip: int = 0) -> tuple[Parameter, ...]:
    """The named parameters of ``target``, the first ``skip`` left out.

    Raises TypeError, ValueError or NameError when the signature can't be read.
    """
    signature = inspect.signature(target, eval_str=True)
    parameters = list(signature.parameters.values())[skip:]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(_parameter(each) for each in parameters if each.kind in named)


def convert_settings(
    policy: str,
    parameters: Sequence[Parameter],
    settings: Iterable[tuple[str, Value]],
    common: Sequence[Parameter] = (),
) -> dict[str, object]:
    """Typed arguments for a policy from the settings of a spec.

    Args:
        common: settings that every policy takes besides its own ``parameters``.

    Raises SpecError for an unknown key, a value of the wrong type or a missing setting.
    """
    known = {parameter.name: parameter for parameter in (*parameters, *common)}
    arguments: dict[str, object] = {}
    for key, value in settings:
        if key not in known:
            raise SpecError(_unknown_key(policy, key, parameters, common))
        try:
            arguments[key] = known[key].convert(value)
        except ValueError as error:
            raise SpecError(f"{policy}: {key}={shown(value.text)} {error}") from None
    missing = [each for each in parameters if each.required and each.name not in arguments]
    if missing:
        wanted = " and ".join(f"{each.name} ({each.kind})" for each in missing)
        raise SpecError(f"{policy} needs {wanted}; write {policy}:{missing[0].name}=VALUE")
    return arguments


def _unknown_key(
    policy: str, key: str, parameters: Sequence[Parameter], common: Sequence[Parameter]
) -> str:
    own, shared = [each.name for each in parameters], [each.name for each in common]
    takes = f"it takes {', '.join(own)}" if own else "it takes no parameters"
    takes += f"; every policy takes {', '.join(shared)}" if shared else ""
    return (
        f"{policy} has no parameter {shown(key)}{did_you_mean(key, own + shared) or ';'} ({takes})"
    )


def _parameter(source: inspect.Parameter) -> Parameter:
    annotation: Any = source.annotation
    if annotation is REQUIRED:
        plain = isinstance(source.default, bool | int | float | str)
        annotation = type(source.default) if plain else str
    annotation, optional = _without_none(annotation)
    kind, read = _reader(annotation)
    return Parameter(source.name, kind, optional, source.default, read)


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if typing.get_origin(annotation) not in (types.UnionType, Union):
        return annotation, False
    members = [each for each in typing.get_args(annotation) if each is not type(None)]
    optional = len(members) < len(typing.get_args(annotation))
    return (members[0] if len(members) == 1 else annotation), optional


def _reader(annotation: Any) -> tuple[str, Callable[[Value], object] | None]:
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    origin, arguments = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if origin is Literal and all(isinstance(each, str) for each in arguments):
        return f"one of {', '.join(arguments)}", _choice(arguments)
    if origin in _CONTAINERS and set(arguments) <= {str, Ellipsis}:
        container = _CONTAINERS[origin]
        return "a list such as [a;b]", lambda value: container(_strings(value))
    return str(annotation), None


def _strings(value: Value) -> Sequence[str]:
    if value.items is not None and not value.quoted:
        return value.items
    return (value.text,) if value.text or value.quoted else ()


def _choice(choices: Sequence[str]) -> Callable[[Value], str]:
    def read(value: Value) -> str:
        if value.text not in choices:
            raise ValueError(value.text)
        return value.text

    return read


def _float(value: Value) -> float:
    number = float(value.text)
    if not math.isfinite(number):
        raise ValueError(value.text)
    return number


def _bool(value: Value) -> bool:
    try:
        return _BOOLEANS[value.text.lower()]
    except KeyError as error:
        raise ValueError(value.text) from error


_SCALARS: dict[object, tuple[str, Callable[[Value], object]]] = {
    str: ("text", lambda value: value.text),
    int: ("a whole number", lambda value: int(value.text)),
    float: ("a number", _float),
    bool: ("true or false", _bool),
}
