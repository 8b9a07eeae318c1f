"""The chat template and tokenizer with which messages become tokens, from a model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from leyline_proxy.render.renderer import ChatRenderer
from leyline_proxy.upstream.client import RendererDocument

from ..engines.process import shipped_model
from ..errors import TokenizerError

SHIPPED = "shipped"
"""Names the tokenizer of the model that ships with Leyline."""
_TOKENIZER = "tokenizer.json"
_MAX_BYTES = 256 << 20


def load_renderer(place: str) -> ChatRenderer:
    """Return the renderer of a model's folder.

    Args:
        place: a folder with ``tokenizer.json`` and a chat template, the former's own path, or
            :data:`SHIPPED`.

    Raises:
        EngineUnavailable: the shipped one is named, and the replay engine isn't installed.
        TokenizerError: a file is missing or unreadable.
    """
    folder = shipped_model() if place == SHIPPED else Path(place).expanduser()
    if folder.name == _TOKENIZER:
        folder = folder.parent
    found = folder_renderer(folder)
    try:
        return ChatRenderer(found.chat_template, found.special_tokens, found.tokenizer_json)
    except Exception as error:  # the tokenizer's library raises Exception itself
        raise TokenizerError(f"{folder} has no usable tokenizer: {error}") from error


def folder_renderer(folder: Path) -> RendererDocument:
    """Return the chat template and tokenizer of a model's folder.

    Raises:
        TokenizerError: a file is missing, or of another form.
    """
    if not folder.is_dir():
        raise TokenizerError(f"{folder} is no folder with a tokenizer and a chat template")
    tokenizer = _text(folder / _TOKENIZER)
    if tokenizer is None:
        raise TokenizerError(f"{folder} has no tokenizer.json: name the model's own folder")
    settings: Any = {}
    if (text := _text(folder / "tokenizer_config.json")) is not None:
        try:
            settings = msgspec.json.decode(text)
        except msgspec.DecodeError:
            settings = None
    if not isinstance(settings, dict):
        raise TokenizerError(f"{folder}: its tokenizer_config.json isn't a JSON object")
    template = _text(folder / "chat_template.jinja") or _named(settings.get("chat_template"))
    if not template:
        raise TokenizerError(
            f"{folder} has no chat template, so no session can be rendered: add chat_template.jinja"
        )
    special = {
        name: text
        for name, value in settings.items()
        if name.endswith("_token")
        and isinstance(text := value.get("content") if isinstance(value, dict) else value, str)
    }
    return RendererDocument(template, special, tokenizer)


def _named(template: object) -> str:
    """Return a configured template: the one, or of several the default."""
    match template:
        case str():
            return template
        case [*several]:
            named = [each for each in several if isinstance(each, dict)]
            found = [each.get("template") for each in named if each.get("name") == "default"]
            return found[0] if found and isinstance(found[0], str) else ""
    return ""


def _text(path: Path) -> str | None:
    """Return a file's text; None if there is none.

    Raises:
        TokenizerError: it can't be read.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise TokenizerError(f"{path} has more than {_MAX_BYTES >> 20} MiB")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} can't be read ({type(error).__name__})") from error
