"""The trained models that ship with the package, one folder each; see their README.md."""

from __future__ import annotations

from pathlib import Path

THINKING_MODEL_NAME = "leyline-recall-thinking"
"""The model that thinks, and whose chat template strips it."""
_FOLDERS = {
    "leyline-recall": "plain",
    "leyline-recall-notes": "notes",
    THINKING_MODEL_NAME: "thinking",
}
TRAINED_MODEL_NAMES = tuple(_FOLDERS)
DEFAULT_MODEL_NAME = "leyline-recall"
"""The model that is served when none is named."""


def trained_model_dir(name: str) -> Path | None:
    """Return the folder of the shipped model of that name; None if there is none."""
    folder = _FOLDERS.get(name)
    return Path(__file__).parent / folder if folder else None
