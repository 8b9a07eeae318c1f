"""The JSON Schema of a configuration file, for editors and for checks before a roll-out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from leyline_policies.errors import PluginError
from leyline_policies.grammar import MAX_STEPS
from leyline_policies.modifiers import MODIFIERS
from leyline_policies.registry import PolicyDefinition, Registry


def policy_schema(registry: Registry) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of files for `leyline_policies.config.load_policies`.

    It imports every plugin; one that is broken can't be configured, so it is left out.
    """
    definitions = list(usable(registry))
    named = {each.name: {"$ref": f"#/$defs/{each.name}"} for each in definitions}
    pipeline = {
        "type": "object",
        "properties": {"policies": {"$ref": "#/$defs/pipeline"}},
        "required": ["policies"],
        "additionalProperties": False,
    }
    by_name = {"type": "object", "additionalProperties": pipeline}
    step = {
        "type": "object",
        "properties": named,
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
    }
    # Text is a step of the spec language, which a schema can't check beyond the first name.
    names = "|".join(each.name.replace(".", r"\.") for each in definitions)
    written = {"type": "string", "pattern": rf"^\s*(?:{names})\s*(?:$|[:|])"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Leyline policies",
        "type": "object",
        "properties": {
            "policies": {"$ref": "#/$defs/pipeline", "description": "for everyone"},
            "tenants": {**by_name, "description": "by tenant; beats models"},
            "models": {**by_name, "description": "by pattern of the model's name (*, ?, [seq])"},
        },
        "additionalProperties": False,
        "$defs": {
            "pipeline": {
                "type": "array",
                "maxItems": MAX_STEPS,
                "items": {"anyOf": [written, step]},
            },
            **{each.name: _settings(each) for each in definitions},
        },
    }


def usable(registry: Registry) -> Iterable[PolicyDefinition]:
    """Return the policies that aren't broken."""
    for name in registry.names():
        try:
            yield registry.get(name)
        except PluginError:
            continue


def _settings(definition: PolicyDefinition) -> dict[str, Any]:
    parameters = (*definition.parameters, *MODIFIERS)
    required = [each.name for each in definition.parameters if each.required]
    found: dict[str, Any] = {
        "description": definition.summary,
        "type": "object" if required else ["object", "null"],
        "properties": {each.name: each.schema() for each in parameters},
        "additionalProperties": False,
    }
    return {**found, "required": required} if required else found
