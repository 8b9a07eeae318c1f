"""The known policies: the built-in ones and those that installed packages offer.

A package offers a policy through the entry-point group ``leyline.policies``::

    [project.entry-points."leyline.policies"]
    short_pastes = "my_package:ShortPastes"

Its code is imported only when that name is asked for, or when all policies are listed.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from leyline_policies.builtin import BUILTINS
from leyline_policies.errors import (
    NameClashError,
    PluginError,
    SpecError,
    UnknownPolicyError,
    did_you_mean,
    shown,
)
from leyline_policies.modifiers import MODIFIERS
from leyline_policies.parameters import Parameter, read_parameters
from leyline_policies.policy import MODES, FunctionPolicy, Policy, wants_context

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "leyline.policies"
BUILT_IN = "built into leyline"

_ASYNC = "is async, and a policy is called without an event loop: write def"


@dataclass(frozen=True, slots=True)
class PolicyDefinition:
    """A policy that can be built: its origin and its settings."""

    name: str
    origin: str
    summary: str
    parameters: tuple[Parameter, ...]
    build: Callable[..., Policy]

    def create(self, arguments: Mapping[str, object]) -> Policy:
        """Build the policy.

        Raises SpecError if the policy refuses the arguments with a ValueError, and PluginError if
        its constructor fails otherwise or what it builds is no policy.
        """
        try:
            policy = self.build(**arguments)
        except ValueError as error:
            raise SpecError(f"{self.name}: {error}") from error
        except Exception as error:
            raise PluginError(
                f"policy {self.name!r} ({self.origin}) can't be built: {_described(error)}"
            ) from error
        return self.check(policy)

    def check(self, policy: Policy) -> Policy:
        """Return the policy. An error that would otherwise fail every turn is found here.

        Raises:
            PluginError: it is no policy, or not the one of this name.
        """
        name, mode = getattr(policy, "name", None), getattr(policy, "mode", None)
        problem = ""
        if not callable(getattr(policy, "transform", None)):
            problem = "it has no method transform(messages, turn_idx)"
        elif inspect.iscoroutinefunction(policy.transform):
            problem = f"its transform {_ASYNC}"
        elif name != self.name:
            problem = f"its attribute name is {name!r}, which must be the registered name"
        elif mode not in MODES:
            problem = f"its attribute mode is {mode!r}, which must be 'amortize' or 'forget'"
        if problem:
            raise PluginError(f"policy {self.name!r} ({self.origin}) is no policy: {problem}")
        return policy


@dataclass(frozen=True, slots=True)
class Candidate:
    """A name that something claims; ``load`` returns the class, function or FunctionPolicy."""

    name: str
    origin: str
    load: Callable[[], object]


class Registry:
    """The policies that can be requested by name."""

    def __init__(self, candidates: Iterable[Candidate]) -> None:
        self._candidates: dict[str, list[Candidate]] = {}
        for candidate in candidates:
            self._candidates.setdefault(candidate.name, []).append(candidate)

    @classmethod
    def discover(cls) -> Registry:
        """Return the built-in policies and the entry points of every installed package.

        Reads package metadata and imports no plugin. Scanning a large environment takes tens of
        milliseconds: keep the registry.
        """
        # Imported here: it costs more than the rest of the package, and only this method needs it.
        from importlib.metadata import entry_points

        points = entry_points(group=ENTRY_POINT_GROUP)
        return cls((*built_in_candidates(), *map(_from_entry_point, points)))

    def having(self, candidate: Candidate) -> Registry:
        """Return these policies with one more, in place of those of its name."""
        others = (each for name, each in self._candidates.items() if name != candidate.name)
        return Registry((*itertools.chain.from_iterable(others), candidate))

    def names(self) -> tuple[str, ...]:
        """Return every name that is claimed, sorted; imports nothing."""
        return tuple(sorted(self._candidates))

    def get(self, name: str) -> PolicyDefinition:
        """Return the policy of that name.

        Raises UnknownPolicyError (with the closest names), NameClashError (naming both packages)
        or PluginError (naming the package and its entry point).
        """
        candidates = self._candidates.get(name)
        if candidates is None:
            known = self.names()
            raise UnknownPolicyError(
                f"no policy is called {shown(name)}{did_you_mean(name, known)} "
                f"(known: {', '.join(known)})"
            )
        if len(candidates) > 1:
            claims = " and ".join(candidate.origin for candidate in candidates)
            raise NameClashError(f"the policy name {name!r} is claimed twice: {claims}")
        return define(candidates[0])

    def all(self) -> tuple[PolicyDefinition, ...]:
        """Return every policy, sorted by name; imports every plugin.

        Raises NameClashError or PluginError for the first one that is broken.
        """
        return tuple(self.get(name) for name in self.names())


def built_in_candidates() -> tuple[Candidate, ...]:
    """Return the policies of this package."""

    def candidate(name: str, class_name: str) -> Candidate:
        def load() -> object:
            module = importlib.import_module(f"leyline_policies.builtin.{name}")
            return getattr(module, class_name)

        return Candidate(name, BUILT_IN, load)

    return tuple(candidate(name, class_name) for name, class_name in BUILTINS.items())


def _from_entry_point(point: EntryPoint) -> Candidate:
    package = "an unnamed distribution"
    if point.dist is not None:
        package = f"distribution {point.dist.name} {point.dist.version}"
    return Candidate(
        point.name, f"{package}, entry point '{point.name} = {point.value}'", point.load
    )


def define(candidate: Candidate) -> PolicyDefinition:
    """Return the policy of a candidate.

    Raises:
        PluginError: it can't be imported, or isn't a class or function of which a policy can be
        made.
    """
    try:
        loaded = candidate.load()
    except (Exception, SystemExit) as error:  # whatever a plugin's import raises, it is named
        raise PluginError(
            f"policy {candidate.name!r} can't be imported ({candidate.origin}): {_described(error)}"
        ) from error
    try:
        return _definition(candidate, loaded)
    except (TypeError, ValueError, NameError) as error:
        raise PluginError(
            f"policy {candidate.name!r} ({candidate.origin}) can't be used: {_described(error)}"
        ) from error


def _definition(candidate: Candidate, loaded: object) -> PolicyDefinition:
    """Return a definition; a class has its constructor's settings, a function those after two."""
    if inspect.isclass(loaded):
        build = cast("Callable[..., Policy]", loaded)  # its product is checked when it is built
        parameters = _own_parameters(loaded)
        return PolicyDefinition(
            candidate.name, candidate.origin, _summary(loaded), parameters, build
        )
    if inspect.isfunction(loaded):
        loaded = FunctionPolicy(candidate.name, "amortize", loaded)
    if not isinstance(loaded, FunctionPolicy):
        raise TypeError(
            f"it is a {type(loaded).__name__}; a policy is a class, a function "
            "f(messages, turn_idx, *, settings) or the result of @function_policy"
        )
    if inspect.iscoroutinefunction(loaded.function):
        raise TypeError(f"the function {_ASYNC}")
    taken = list(inspect.signature(loaded.function).parameters)
    if len(taken) < 2:
        raise TypeError("the function must take (messages, turn_idx)")
    skip = 3 if wants_context(loaded.function) else 2
    return PolicyDefinition(
        candidate.name,
        candidate.origin,
        _summary(loaded.function),
        _own_parameters(loaded.function, skip),
        loaded.with_settings,
    )


def _own_parameters(target: Callable[..., object], skip: int = 0) -> tuple[Parameter, ...]:
    parameters = read_parameters(target, skip=skip)
    reserved = {each.name for each in MODIFIERS} & {each.name for each in parameters}
    if reserved:
        raise TypeError(
            f"its parameter {min(reserved)} has a name that every policy takes already; rename it"
        )
    return parameters


def _summary(documented: object) -> str:
    return (inspect.getdoc(documented) or "").partition("\n")[0]


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
