"""Policies from a line of text: ``"truncate_older_than:n=2 | redact:pattern='sk-\\w+'"``."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, cast

from leyline_policies.allowance import Allowance
from leyline_policies.errors import SpecError
from leyline_policies.grammar import MAX_STEPS, Step, Value, parse_steps
from leyline_policies.kinds import POLICIES
from leyline_policies.modifiers import MODIFIERS, Modifiers
from leyline_policies.parameters import SettingError, convert_settings
from leyline_policies.policy import FunctionPolicy, Policy, TransformFunction
from leyline_policies.registry import Candidate, PolicyDefinition, Registry, define

__all__ = ["Step", "Value", "build_policy", "load_pipeline", "parse_steps", "policy_of"]

_NOT_INSTALLED = "not installed"
_MAX_DEPTH = 3
"""Levels of policies inside a setting. Each may try those inside it more than once."""


def load_pipeline(
    spec: str, registry: Registry | None = None, *, allowance: Allowance | None = None
) -> tuple[Policy, ...]:
    """Return the policies that ``spec`` names, in order; none for blank text.

    ``spec`` is ``name:key=value,key=value | name…`` (see `leyline_policies.grammar`); values are
    read as the types of the policy's constructor. Without a ``registry`` the installed packages are
    searched again. With an ``allowance`` the spec is a request's: its patterns are checked.

    Raises SpecError if the text is wrong (unknown name or key, a value of the wrong type, a setting
    that the policy refuses) and PluginError if an installed policy is broken.
    """
    steps = parse_steps(spec)
    if not steps:
        return ()
    known = registry or Registry.discover()
    return tuple(build_policy(step.name, step.settings, known, allowance) for step in steps)


def build_policy(
    name: str,
    settings: Iterable[tuple[str, object]],
    registry: Registry,
    allowance: Allowance | None = None,
) -> Policy:
    """Return one policy with its settings, those that every policy takes included.

    Args:
        settings: keys with values: a `Value` as written in a spec, or a typed one, which must be
            of the parameter's type already.
        allowance: checks patterns, if the settings are a request's.

    Raises SpecError and PluginError as `load_pipeline`.
    """
    definition = registry.get(name)
    taken = {parameter.name for parameter in definition.parameters}
    arguments = convert_settings(name, definition.parameters, settings, MODIFIERS)
    if allowance is not None:
        _check(definition, arguments, allowance)
    own = {key: value for key, value in arguments.items() if key in taken}
    for parameter in definition.parameters:
        key = parameter.name
        if parameter.type is POLICIES and key in own:
            own[key] = _inner(name, key, own[key], registry, allowance)
    around: dict[str, Any] = {key: value for key, value in arguments.items() if key not in taken}
    policy = definition.create(own)
    try:
        return Modifiers(**around).around(policy) if around else policy
    except ValueError as error:
        raise SpecError(f"{name}: {error}") from error


def policy_of(
    offered: Policy | type[Policy] | TransformFunction,
    settings: Mapping[str, object] | None = None,
    *,
    name: str | None = None,
) -> Policy:
    """Return the policy of a class or function, as if a package offered it.

    Args:
        offered: a class, a function, or a policy that was made of one already.
        settings: typed values for a class or function: its own settings, and those that every
            policy takes.
        name: the one to register it under; without it, its own.

    Raises SpecError and PluginError as `load_pipeline`; also SpecError for settings of a policy
    that was made already.
    """
    own = name or getattr(offered, "name", None)
    if not isinstance(own, str):
        own = str(getattr(offered, "__name__", type(offered).__name__))
    if not _is_made(offered):
        candidate = Candidate(own, _NOT_INSTALLED, lambda: offered)
        return build_policy(own, (settings or {}).items(), Registry.discover().having(candidate))
    if settings:
        raise SpecError(f"{own} has its settings already; give its class or function with settings")
    source = offered if isinstance(offered, FunctionPolicy) else type(offered)
    return define(Candidate(own, _NOT_INSTALLED, lambda: source)).check(cast("Policy", offered))


def _is_made(offered: object) -> bool:
    if isinstance(offered, FunctionPolicy):
        return bool(offered.settings)
    return not inspect.isclass(offered) and callable(getattr(offered, "transform", None))


def _check(
    definition: PolicyDefinition, arguments: Mapping[str, Any], allowance: Allowance
) -> None:
    """Raise SettingError for a setting that a request may not bring."""
    with_patterns = {each.name for each in definition.parameters if each.type.holds_patterns}
    for key, value in arguments.items():
        try:
            allowance.check(key, value)
            if key in with_patterns:
                allowance.take([value] if isinstance(value, str) else value or ())
        except ValueError as error:
            raise SettingError(f"{definition.name}: {key}: {error}", key) from error


def _inner(
    name: str, key: str, specs: Any, registry: Registry, allowance: Allowance | None
) -> tuple[Policy, ...]:
    """Return the policies of a setting that is a list of specs; a pipeline counts as one."""
    built: list[Policy] = []
    for spec in specs:
        try:
            policies = load_pipeline(spec, registry, allowance=allowance)
        except SpecError as error:
            raise SettingError(f"{name}: {key}: {error}", key) from error
        if not policies:
            raise SettingError(f"{name}: {key} has a spec without a policy; leave it out", key)
        built.append(policies[0] if len(policies) == 1 else _as_one(policies))
    if sum(map(_size, built)) > MAX_STEPS:
        raise SettingError(f"{name}: {key} has more than {MAX_STEPS} policies inside", key)
    if max(map(_depth, built), default=0) > _MAX_DEPTH:
        raise SettingError(f"{name}: {key} nests policies too deep", key)
    return tuple(built)


def _as_one(policies: tuple[Policy, ...]) -> Policy:
    """Return policies of one spec, one after the other, as one."""
    from leyline_policies.compose import pipeline  # most specs hold no pipeline inside

    return pipeline(*policies)


def _depth(policy: Policy) -> int:
    """Return the number of levels of policies inside others."""
    wrapped = getattr(policy, "policy", None)
    if wrapped is not None:
        return _depth(wrapped)
    held: tuple[Policy, ...] = getattr(policy, "policies", ())
    return 1 + max(map(_depth, held), default=0)


def _size(policy: Policy) -> int:
    """Return the number of policies that one is, those inside it included."""
    wrapped = getattr(policy, "policy", None)
    if wrapped is not None:
        return _size(wrapped)
    held: tuple[Policy, ...] = getattr(policy, "policies", ())
    return max(1, sum(map(_size, held)))
