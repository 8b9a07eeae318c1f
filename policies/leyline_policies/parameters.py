"""The settings that a policy takes, read from its constructor's (or function's) signature."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leyline_policies.errors import SpecError, did_you_mean, shown
from leyline_policies.grammar import Value
from leyline_policies.kinds import Kind, kind_of, without_none

REQUIRED: Any = inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class Parameter:
    """One setting: its name, its type of values, its default and its purpose."""

    name: str
    type: Kind
    optional: bool
    default: object
    help: str = ""

    @property
    def kind(self) -> str:
        """Type of its values, in words."""
        return self.type.words

    @property
    def required(self) -> bool:
        """True if a spec must give it."""
        return self.default is REQUIRED

    def convert(self, value: object) -> object:
        """Return the setting's value from its written form.

        Args:
            value: a `Value` of the spec language, or a value that another format has typed already.

        Raises:
            ValueError: with the words that follow "key=value" in the message.
        """
        nothing = isinstance(value, Value) and not value.quoted and value.text.lower() == "none"
        if self.optional and (nothing or value is None):
            return None
        if self.type.read is None or self.type.take is None:
            raise ValueError(f"can't be set in a spec: its type is {self.kind}")
        try:
            return self.type.read(value) if isinstance(value, Value) else self.type.take(value)
        except ValueError as error:
            raise ValueError(f"is not {self.kind}") from error

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the setting's values."""
        described: dict[str, Any] = {"description": self.help} if self.help else {}
        if self.type.schema is None:
            return {**described, "not": {}}
        if not self.required and _is_json(self.default):
            described["default"] = _plain(self.default)
        if self.optional:
            return {**described, "anyOf": [self.type.schema, {"type": "null"}]}
        return {**described, **self.type.schema}


def read_parameters(target: Callable[..., object], *, skip: int = 0) -> tuple[Parameter, ...]:
    """Return the named parameters of ``target``, without the first ``skip``.

    The annotation of a parameter may hold its purpose: ``limit: Annotated[int, "characters"]``.

    Raises TypeError, ValueError or NameError if the signature can't be read.
    """
    signature = inspect.signature(target, eval_str=True)
    parameters = list(signature.parameters.values())[skip:]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(_parameter(each) for each in parameters if each.kind in named)


def convert_settings(
    policy: str,
    parameters: Sequence[Parameter],
    settings: Iterable[tuple[str, object]],
    common: Sequence[Parameter] = (),
) -> dict[str, object]:
    """Return typed arguments for a policy from the settings of a spec.

    Args:
        settings: keys with values as `Parameter.convert` takes them.
        common: settings that every policy takes besides its own ``parameters``.

    Raises:
        SettingError: an unknown key or a value of the wrong type.
        SpecError: a missing setting.
    """
    known = {parameter.name: parameter for parameter in (*parameters, *common)}
    arguments: dict[str, object] = {}
    for key, value in settings:
        if key not in known:
            raise SettingError(_unknown_key(policy, key, parameters, common), key)
        try:
            arguments[key] = known[key].convert(value)
        except ValueError as error:
            raise SettingError(f"{policy}: {key}={_written(value)} {error}", key) from None
    missing = [each for each in parameters if each.required and each.name not in arguments]
    if missing:
        wanted = " and ".join(f"{each.name} ({each.kind})" for each in missing)
        raise SpecError(f"{policy} needs {wanted}; write {policy}:{missing[0].name}=VALUE")
    return arguments


class SettingError(SpecError):
    """A policy doesn't take a setting; ``key`` is the one."""

    def __init__(self, message: str, key: str) -> None:
        super().__init__(message)
        self.key = key


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
    words = ""
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, *rest = typing.get_args(annotation)
        words = next((each for each in rest if isinstance(each, str)), "")
    annotation, optional = without_none(annotation)
    return Parameter(source.name, kind_of(annotation), optional, source.default, words)


def _written(value: object) -> str:
    """Return a wrong value, about as its writer wrote it."""
    if isinstance(value, Value):
        return shown(value.text)
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, list):
        return f"[{'...' if value else ''}]"
    words = {"None": "null", "True": "true", "False": "false"}
    return "{...}" if isinstance(value, Mapping) else words.get(str(value), str(value)[:80])


def _is_json(value: object) -> bool:
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_json, value))
    return value is None or isinstance(value, bool | int | float | str)


def _plain(value: object) -> object:
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    return list(value) if isinstance(value, list | tuple) else value
