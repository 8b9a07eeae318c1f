"""A list of models as Anthropic's clients read it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

_LATEST = 253_402_300_799
"""The last second that a date of four digits can name."""


def map_models(document: Mapping[str, Any]) -> dict[str, Any]:
    """The page that holds all models of OpenAI's list; what is no model is left out."""
    listed = document.get("data")
    models = [
        _model(entry)
        for entry in (listed if isinstance(listed, list) else ())
        if isinstance(entry, Mapping) and isinstance(entry.get("id"), str)
    ]
    ids = [model["id"] for model in models] or [None]
    return {"data": models, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}


def _model(entry: Mapping[str, Any]) -> dict[str, Any]:
    window = entry.get("max_model_len")
    return {
        "type": "model",
        "id": entry["id"],
        "display_name": entry["id"],
        "created_at": _date(entry.get("created")),
        "lifecycle": "active",
        "max_input_tokens": window if isinstance(window, int) else None,
        "max_tokens": None,
    }


def _date(created: object) -> str:
    """As RFC 3339; the epoch where nobody knows, as Anthropic says of its own."""
    seconds = created if isinstance(created, int) and 0 <= created <= _LATEST else 0
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
