"""Policies from a line of text: ``"truncate_older_than:n=2 | redact:pattern='sk-\\w+'"``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from leyline_policies.errors import SpecError
from leyline_policies.grammar import Step, Value, parse_steps
from leyline_policies.modifiers import MODIFIERS, Modifiers
from leyline_policies.parameters import convert_settings
from leyline_policies.policy import Policy
from leyline_policies.registry import Registry

__all__ = ["Step", "Value", "build_policy", "load_pipeline", "parse_steps"]


def load_pipeline(spec: str, registry: Registry | None = None) -> tuple[Policy, ...]:
    """Return the policies that ``spec`` names, in order; none for blank text.

    ``spec`` is ``name:key=value,key=value | name…`` (see `leyline_policies.grammar`); values are
    read as the types of the policy's constructor. Without a ``registry`` the installed packages are
    searched again.

    Raises SpecError if the text is wrong (unknown name or key, a value of the wrong type, a setting
    that the policy refuses) and PluginError if an installed policy is broken.
    """
    steps = parse_steps(spec)
    if not steps:
        return ()
    known = registry or Registry.discover()
    return tuple(build_policy(step.name, step.settings, known) for step in steps)


def build_policy(name: str, settings: Iterable[tuple[str, object]], registry: Registry) -> Policy:
    """Return one policy with its settings, those that every policy takes included.

    Args:
        settings: keys with values: a `Value` as written in a spec, or a typed one, which must be
            of the parameter's type already.

    Raises SpecError and PluginError as `load_pipeline`.
    """
    definition = registry.get(name)
    taken = {parameter.name for parameter in definition.parameters}
    arguments = convert_settings(name, definition.parameters, settings, MODIFIERS)
    own = {key: value for key, value in arguments.items() if key in taken}
    around: dict[str, Any] = {key: value for key, value in arguments.items() if key not in taken}
    policy = definition.create(own)
    try:
        return Modifiers(**around).around(policy) if around else policy
    except ValueError as error:
        raise SpecError(f"{name}: {error}") from error
