"""Errors in the configuration, each with the line, variable or flag that has it."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_settings import SettingsError

from ..errors import closest
from ..model.name_rule import rule_of
from .file import ConfigError, Located, read_config
from .named_files import NamedFileError
from .proxy import Settings

PREFIX = "LEYLINE_"

_SHAPES = {
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "dict_type": "must have entries NAME: VALUE",
    "model_type": "must have entries NAME: VALUE",
    "missing": "is missing",
}
"""Messages of pydantic that speak of Python's types, in the words of a file of settings."""
_FIELD = re.compile(r'field "(\w+)"')
_LEADING = re.compile(r"([a-z_]+)[: ]")
_NEEDED = re.compile(r" needs (?:an? )?([a-z_]+)|^([a-z_]+) must have at least")
_SERVICE = re.compile(r"(tcp|udp)://")


@dataclass(frozen=True, slots=True)
class Fault:
    """One error."""

    place: str
    """Location for its author: ``leyline.yaml:3:7``, ``LEYLINE_PORT``, ``--port``."""
    problem: str
    """Begins with the setting's name, if it concerns one. Holds no value."""
    fix: str

    def __str__(self) -> str:
        what = f"{self.place}: {self.problem}" if self.place else self.problem
        return f"{what}\n  fix: {self.fix}" if self.fix else what


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of settings."""

    config: Path | None = None
    flags: Mapping[str, str] = field(default_factory=dict)
    """The given flags, by the settings that they set."""
    environ: Mapping[str, str] = field(default_factory=dict)

    def variable(self, name: str) -> str | None:
        """Return the variable that sets a setting; None if none does, or it is empty."""
        wanted = (PREFIX + name).upper()
        return next(
            (key for key, text in self.environ.items() if text and key.upper() == wanted), None
        )


def faults_of(error: Exception, sources: Sources) -> list[Fault]:
    """Return the errors of :func:`~leyline_proxy.settings.load_settings`, one fault each."""
    if isinstance(error, ConfigError):
        place, _, problem = str(error).partition(": ")
        fix = "" if error.line else "Give a YAML file of settings to --config."
        return [Fault(place, problem, fix)]
    if isinstance(error, FileNotFoundError):
        return [Fault("--config", str(error), "Name an existing file, or leave out the flag.")]
    if isinstance(error, SettingsError):
        return [_unreadable_variable(error, sources)]
    if isinstance(error, ValidationError):
        finder = _Places(sources)
        found = error.errors(include_url=False)
        return [_fault(item, finder, sources) for item in found]
    return [Fault("", str(error), "")]


def fault_of_start(error: Exception, sources: Sources) -> Fault:
    """Return an error of a proxy that starts with settings that can be read. Its message begins
    with the setting, or stands for itself."""
    found = _LEADING.match(str(error))
    loc: Sequence[str] = getattr(error, "loc", ()) or ((found[1],) if found else ())
    if not loc or loc[0] not in Settings.model_fields:
        return Fault("", str(error), "")
    place = _Places(sources).of(loc)
    if isinstance(error, NamedFileError):
        return Fault(place, str(error), "Correct that file, or name another one.")
    return Fault(place, str(error), _fix(place, loc, sources))


def ignored_variables(environ: Mapping[str, str]) -> list[Fault]:
    """Return variables without effect: names that look like settings but aren't, and secrets
    without a value, which their author may take for set."""
    found = []
    for variable in sorted(environ):
        if not variable.upper().startswith(PREFIX) or variable in _OTHERS:
            continue
        name = variable[len(PREFIX) :].lower()
        if name in Settings.model_fields:
            if not environ[variable] and is_secret(name):
                found.append(Fault(variable, _EMPTY, "Give it a value, or remove it."))
            continue
        if name == "config":
            found.append(Fault(variable, _PASSED_OVER, "Name the file with --config."))
            continue
        near = difflib.get_close_matches(name, Settings.model_fields, n=1)
        if near:
            fix = f"Did you mean {PREFIX}{near[0].upper()}?"
            found.append(Fault(variable, _PASSED_OVER, fix))
    return found


_EMPTY = "is empty, and is ignored"
_PASSED_OVER = "is not a setting, and is ignored"
_OTHERS = frozenset(
    f"{PREFIX}{name}"
    for name in (
        "CLAIM_LIMITS",
        "CLIENT_CA",
        "CLIENT_CERT",
        "CLIENT_KEY",
        "DEMO_API_KEY",
        "ENERGY",
        "ENGINE_API_KEY",
        "ENGINE_CHANNEL",
    )
)
"""Variables of other commands, of engines and of deployments."""


class _Places:
    """Finds the place where a setting was written."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._root: Located | None = None
        if sources.config is not None:
            try:
                self._root = read_config(sources.config)
            except (ConfigError, OSError):
                return

    def of(self, loc: Sequence[int | str]) -> str:
        """Return the place; flags win over variables, and those over the file."""
        name = str(loc[0])
        if name in self._sources.flags:
            return self._sources.flags[name]
        variable = self._sources.variable(name)
        if variable is None or not _holds(self._sources.environ[variable], loc[1:]):
            return self._in_file(loc) or variable or ""
        return variable

    def _in_file(self, loc: Sequence[int | str]) -> str:
        at, found = None, self._root
        for part in loc:
            value = found.value if found is not None else None
            if isinstance(value, dict) and str(part) in value and found is not None:
                at, found = found.keys_at[str(part)], value[str(part)]
            elif isinstance(value, list) and isinstance(part, int) and part < len(value):
                found = value[part]
                at = found.at
            else:
                break
        return f"{self._sources.config}:{at[0]}:{at[1]}" if at is not None else ""


def _holds(text: str, path: Sequence[int | str]) -> bool:
    """Return True if a variable's JSON may have a member there; objects of variables and of the
    file are merged, so it may come from either."""
    if not path:
        return True
    try:
        found = json.loads(text)
    except ValueError:
        return True
    return not isinstance(found, dict) or str(path[0]) in found


def _fault(item: Any, places: _Places, sources: Sources) -> Fault:
    # An extra part distinguishes the key of a dictionary from its value.
    loc = [part for part in item["loc"] if part != "[key]"]
    message = str(item["msg"]).removeprefix("Value error, ")
    if not loc:
        named = [places.of((name,)) for name in settings_named(message)]
        return Fault(", ".join(filter(None, dict.fromkeys(named))), message, _change(message))
    name, place = ".".join(map(str, loc)), places.of(loc)
    if item["type"] == "extra_forbidden":
        known = _known(loc)
        fix = closest(str(loc[-1]), known) if known else "Remove it."
        return Fault(place, f"{name} is not a setting", fix)
    shape = _SHAPES.get(item["type"]) or _broken_rule(item)
    problem = f"{name}: {message}" if shape is None else f"{name} {shape}"
    fix = f"Add {loc[-1]}." if item["type"] == "missing" else _fix(place, loc, sources)
    return Fault(place, problem, fix)


def _broken_rule(item: Any) -> str | None:
    """Return the way in which a name breaks its rule; None if the error is another."""
    rule = rule_of(item.get("ctx", {}).get("pattern", ""))
    given = item["input"]
    return rule.broken(given) if rule is not None and isinstance(given, str) else None


def _fix(place: str, loc: Sequence[int | str], sources: Sources) -> str:
    variable = sources.variable(str(loc[0]))
    if variable is not None and place == variable and _SERVICE.match(sources.environ[variable]):
        return (
            "Kubernetes sets this variable for a Service named leyline. Set "
            "enableServiceLinks: false in the pod."
        )
    return ""


def _change(message: str) -> str:
    """Return the fix of an error that concerns several settings."""
    wanted = _NEEDED.search(message)
    if wanted is not None and is_secret(wanted[1] or wanted[2]):
        name = wanted[1] or wanted[2]
        fix = f'Make one: export {PREFIX}{name.upper()}="$(openssl rand -hex 32)"'
        return f"{fix}, the same for all proxies." if name == "session_secret" else f"{fix}."
    names = settings_named(message)
    return f"Change or remove {' or '.join(names)}." if names else ""


def is_secret(name: str) -> bool:
    """Return True if a setting holds a secret, or several."""
    return name in Settings.model_fields and "SecretStr" in str(
        Settings.model_fields[name].annotation
    )


def settings_named(message: str) -> list[str]:
    """Return the settings that a message names, each once, in its order."""
    words = re.findall(r"[a-z_]+", message)
    return [word for word in dict.fromkeys(words) if word in Settings.model_fields]


def _known(loc: Sequence[int | str]) -> set[str]:
    """Return all settings next to the one at ``loc``."""
    model: type[BaseModel] | None = Settings
    for part in loc[:-1]:  # numbers and names of entries are no fields
        if model is not None and part in model.model_fields:
            model = _model_in(model.model_fields[str(part)].annotation)
    return set(model.model_fields) if model is not None else set()


def _model_in(annotation: object) -> type[BaseModel] | None:
    """Return the model of a field's value, or of its entries; None if they have none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)


def unreadable_setting(error: SettingsError) -> str:
    """Return the name of the setting whose variable isn't JSON; empty if the error names none."""
    found = _FIELD.search(str(error))
    return found[1] if found else ""


def _unreadable_variable(error: SettingsError, sources: Sources) -> Fault:
    name = unreadable_setting(error)
    place = sources.variable(name) or name
    return Fault(
        place,
        "isn't valid JSON",
        f"Write it as JSON, or write {name} as YAML in the file of --config.",
    )
