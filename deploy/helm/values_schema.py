"""Writes Leyline's settings into the chart's values.schema.json: ``make chart-schema``.

All else in that file is written by hand, including the settings that the chart keeps to itself.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from leyline_engine.energy import ENERGY_VARIABLE
from leyline_proxy.settings import Settings

SCHEMA = Path(__file__).resolve().parent / "leyline" / "values.schema.json"
_STRING = {"type": "string"}
ALSO_TAKEN: dict[str, list[dict[str, Any]]] = {
    "undeclared": [{"type": "array", "items": _STRING}, _STRING],
}
"""Schemas of values that settings are read from, besides their own type."""


def updated(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the chart's schema with the settings of this version."""
    document = Settings.model_json_schema()
    proxy = schema["properties"]["proxy"]["properties"]
    kept = set(proxy["settings"]["propertyNames"]["not"]["enum"])
    own = {
        name: _with_forms(name, _plain(value, document["$defs"]))
        for name, value in sorted(document["properties"].items())
        if name not in kept
    }
    del own["tenants"]["additionalProperties"]["properties"]["api_keys"]  # secrets
    settings = proxy["settings"] | {"additionalProperties": False, "properties": own}
    # The embedded engine asks for one, too.
    names = ["LEYLINE_" + name.upper() for name in sorted(document["properties"])]
    names.append(ENERGY_VARIABLE)
    other = {"not": {"pattern": "^LEYLINE_"}}
    variable = {"type": "string", "anyOf": [other, {"enum": names}]}
    variables = {
        "type": "array",
        "items": {"type": "object", "required": ["name"], "properties": {"name": variable}},
    }
    merged = proxy | {"settings": settings, "env": variables}
    parts = schema["properties"]
    return schema | {
        "properties": parts | {"proxy": parts["proxy"] | {"properties": merged}},
    }


def _with_forms(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, *ALSO_TAKEN[name]]} if name in ALSO_TAKEN else schema


def _plain(schema: Any, parts: dict[str, Any]) -> Any:
    """Return it without titles and defaults, and with parts in place of references to them."""
    if isinstance(schema, list):
        return [_plain(item, parts) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _plain(parts[re.sub(r".*/", "", schema["$ref"])], parts)
    plain = {
        key: {name: _plain(item, parts) for name, item in value.items()}
        if key == "properties"
        else _plain(value, parts)
        for key, value in schema.items()
        if key not in ("title", "default", "description", "format", "writeOnly")
    }
    if set(plain.get("enum", ())) == {"off", "on"}:
        return {"anyOf": [plain, {"type": "boolean"}]}
    if "off" in plain.get("enum", ()):
        return {"anyOf": [plain, {"const": False}]}  # as YAML reads a bare off
    return plain


def text() -> str:
    """Return the file as it should be."""
    return json.dumps(updated(json.loads(SCHEMA.read_text(encoding="utf-8"))), indent=2) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(text(), encoding="utf-8")
