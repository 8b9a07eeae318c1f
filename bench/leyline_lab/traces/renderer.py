"""The chat template and tokenizer with which recorded messages become tokens, from a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from leyline_proxy.render.renderer import ChatRenderer

from ..engines.process import SHIPPED_NAME, shipped_folder
from ..errors import TokenizerError

SHIPPED = "shipped"
"""Names the tokenizer of the model that ships with Leyline."""

_TOKENIZER = "tokenizer.json"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_renderer(place: str) -> ChatRenderer:
    """Return the renderer of a model's folder.

    Args:
        place: a folder with ``tokenizer.json`` and a chat template, the former's own path, or
            :data:`SHIPPED`.

    Raises:
        TokenizerError: a file is missing or unreadable.
    """
    folder = _shipped() if place == SHIPPED else Path(place).expanduser()
    if folder.name == _TOKENIZER:
        folder = folder.parent
    try:
        tokenizer = (folder / _TOKENIZER).read_text(encoding="utf-8")
        settings = _settings(folder / "tokenizer_config.json")
        template = _template(folder / "chat_template.jinja", settings)
        return ChatRenderer(template, _special(settings), tokenizer)
    except TokenizerError:
        raise
    except Exception as error:  # the tokenizer's library raises Exception itself
        raise TokenizerError(f"{folder} has no usable tokenizer: {error}") from error


def _shipped() -> Path:
    folder = shipped_folder(SHIPPED_NAME)
    if folder is None:
        raise TokenizerError("the shipped tokenizer is missing; name a model's folder instead")
    return folder


def _settings(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def _template(path: Path, settings: dict[str, Any]) -> str:
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):  # several by name
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    if not isinstance(found, str):
        raise TokenizerError(
            f"{path.parent} has no chat template: neither {path.name} nor a member"
        )
    return found


def _special(settings: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _SPECIAL:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found
