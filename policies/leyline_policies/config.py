"""Policies from a YAML file: for everyone, by tenant and by model.

::

    policies:
      - clear_tool_uses: {keep: 3, when: "tokens > 60000"}
      - redact: {detectors: [email, aws_key]}
      - truncate_older_than:n=2           # a step of the spec language
    tenants:
      team-a: {policies: [keep_all]}
    models:
      "qwen*": {policies: []}
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from leyline_policies.errors import SpecError, did_you_mean, shown
from leyline_policies.grammar import MAX_STEPS, Step, parse_steps, value_of, write_steps
from leyline_policies.located import MAX_BYTES, ConfigError, Located, read_yaml
from leyline_policies.parameters import SettingError
from leyline_policies.policy import Policy
from leyline_policies.registry import Registry
from leyline_policies.spec import build_policy

__all__ = ["ConfigError", "PolicySet", "load_policies", "parse_policies"]

_TOP = ("policies", "tenants", "models")
_NAMED = re.compile(r"(?:[\w.-]+: )?(\w+)[=:]")


@dataclass(frozen=True, slots=True)
class ConfiguredPipeline:
    """The policies of one place in the file, and their spec."""

    policies: tuple[Policy, ...] = ()
    spec: str = ""


@dataclass(frozen=True, slots=True)
class PolicySet:
    """The policies for each tenant and model."""

    default: ConfiguredPipeline
    tenants: Mapping[str, ConfiguredPipeline]
    models: Mapping[str, ConfiguredPipeline]
    """Pipelines by pattern; the first that fits holds."""

    def choose(self, tenant: str | None, model: str | None) -> tuple[Policy, ...]:
        """Return the policies of the tenant, else of the model, else of everyone.

        The same tuple every time, so that results for it can be found by identity.
        """
        if tenant is not None and tenant in self.tenants:
            return self.tenants[tenant].policies
        for pattern, pipeline in self.models.items():
            if model is not None and fnmatchcase(model, pattern):
                return pipeline.policies
        return self.default.policies

    def unknown_tenants(self, known: Collection[str]) -> tuple[str, ...]:
        """Return the tenants that have a pipeline and aren't among the known ones."""
        return tuple(sorted(self.tenants.keys() - set(known)))

    def describe(self) -> dict[str, str]:
        """Return each pipeline as a spec, by ``default``, ``tenant NAME`` and ``model PATTERN``."""
        named = {f"tenant {name}": each for name, each in self.tenants.items()}
        named |= {f"model {pattern}": each for pattern, each in self.models.items()}
        return {key: each.spec for key, each in {"default": self.default, **named}.items()}


def load_policies(path: Path | str, registry: Registry | None = None) -> PolicySet:
    """Return the policies that a file configures.

    Raises:
        ConfigError: the file can't be read, or is wrong; names line and column.
        PluginError: an installed policy is broken.
        MissingExtraError: PyYAML is not installed.
    """
    file = Path(path)
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
        text = content.decode("utf-8", "strict" if len(content) <= MAX_BYTES else "replace")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(f"can't be read: {reason}", str(file)) from error
    except UnicodeDecodeError as error:
        at = (content.count(b"\n", 0, error.start) + 1, 1)
        raise ConfigError("is no UTF-8 text", str(file), at) from error
    return parse_policies(text, registry, source=str(file))


def parse_policies(
    text: str, registry: Registry | None = None, *, source: str = "policies.yaml"
) -> PolicySet:
    """Return the policies that a text configures.

    Args:
        registry: the known policies; without it, the installed packages are searched.
        source: the text's name, for errors.

    Raises as `load_policies`.
    """
    return _Parser(source, registry or Registry.discover()).whole(read_yaml(text, source))


class _Parser:
    def __init__(self, source: str, registry: Registry) -> None:
        self._source = source
        self._registry = registry

    def whole(self, root: Located) -> PolicySet:
        members = self._members(root, "the file", _TOP)
        default = members.get("policies")
        return PolicySet(
            ConfiguredPipeline() if default is None else self._pipeline(default),
            self._by_name(members.get("tenants"), "tenants"),
            self._by_name(members.get("models"), "models"),
        )

    def _by_name(self, found: Located | None, key: str) -> dict[str, ConfiguredPipeline]:
        if found is None:
            return {}
        what = {"tenants": "a tenant", "models": "a model"}[key]
        result = {}
        for name, entry in self._members(found, key).items():
            members = self._members(entry, what, ("policies",))
            if "policies" not in members:
                raise self._error(f"{shown(name)} needs policies: a list", entry.at)
            result[name] = self._pipeline(members["policies"])
        return result

    def _members(
        self, found: Located, what: str, known: tuple[str, ...] | None = None
    ) -> dict[str, Located]:
        if not isinstance(found.value, dict):
            wanted = f" with {', '.join(known)}" if known else ""
            raise self._error(f"{what} must be an object{wanted}", found.at)
        for key in found.value:
            if known is not None and key not in known:
                raise self._error(
                    f"{what} has no key {shown(key)}{did_you_mean(key, known) or ';'} "
                    f"(known: {', '.join(known)})",
                    found.keys_at[key],
                )
        return found.value

    def _pipeline(self, found: Located) -> ConfiguredPipeline:
        if not isinstance(found.value, list):
            raise self._error("policies must be a list, such as [keep_all]", found.at)
        policies: list[Policy] = []
        steps: list[Step] = []
        for item in found.value:
            for step, policy in self._item(item):
                steps.append(step)
                policies.append(policy)
                if len(steps) > MAX_STEPS:
                    raise self._error(f"a pipeline has at most {MAX_STEPS} policies", item.at)
        return ConfiguredPipeline(tuple(policies), write_steps(steps))

    def _item(self, item: Located) -> list[tuple[Step, Policy]]:
        if isinstance(item.value, str):
            return self._written(item.value, item.at)
        if not isinstance(item.value, dict) or len(item.value) != 1:
            raise self._error(
                "a policy is its name, or an object of one member, such as "
                "{truncate_older_than: {n: 2}}",
                item.at,
            )
        ((name, settings),) = item.value.items()
        given = {} if settings.value is None else settings.value
        if not isinstance(given, dict):
            raise self._error(f"the settings of {name} must be an object", settings.at)
        typed = [(key, value.plain()) for key, value in given.items()]
        try:
            policy = build_policy(name, typed, self._registry)
        except SpecError as error:
            raise self._located(error, item.keys_at[name], settings.keys_at) from error
        return [(Step(name, tuple((key, value_of(value)) for key, value in typed)), policy)]

    def _written(self, text: str, at: tuple[int, int]) -> list[tuple[Step, Policy]]:
        try:
            steps = parse_steps(text)
            return [
                (step, build_policy(step.name, step.settings, self._registry)) for step in steps
            ]
        except SpecError as error:
            raise self._located(error, at, {}) from error

    def _located(
        self, error: SpecError, at: tuple[int, int], settings: Mapping[str, tuple[int, int]]
    ) -> ConfigError:
        """Return the error at the setting that it is about, if it names one; else at the policy."""
        named = _NAMED.match(str(error))
        key = error.key if isinstance(error, SettingError) else named[1] if named else ""
        return self._error(str(error), settings.get(key, at))

    def _error(self, message: str, at: tuple[int, int]) -> ConfigError:
        return ConfigError(message, self._source, at)
