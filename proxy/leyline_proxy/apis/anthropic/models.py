"""Map a list of models to Anthropic's shape."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

_LATEST = 253_402_300_799
"""The last second of the year 9999."""


_WINDOW = ("max_model_len", "max_input_tokens", "context_length", "context_window")
"""Members by which servers report a model's window."""


def map_models(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return one page with all models of OpenAI's list; entries that are no models are left out."""
    listed = document.get("data")
    models = [
        map_model(entry)
        for entry in (listed if isinstance(listed, list) else ())
        if isinstance(entry, Mapping) and isinstance(entry.get("id"), str)
    ]
    ids = [model["id"] for model in models] or [None]
    return {"data": models, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}


def map_model(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model of OpenAI's list, or one that is in this shape already."""
    window = next((entry[name] for name in _WINDOW if isinstance(entry.get(name), int)), None)
    return {
        "type": "model",
        "id": entry["id"],
        "display_name": entry["id"],
        "created_at": _date(entry.get("created")),
        "lifecycle": "active",
        "max_input_tokens": window,
        "max_tokens": None,
    }


def _date(created: object) -> str:
    """Return a date in RFC 3339; the epoch if unknown, like Anthropic's API."""
    seconds = created if isinstance(created, int) and 0 <= created <= _LATEST else 0
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
