"""An engine's description of its own chat rendering."""

from __future__ import annotations

from typing import Any

import msgspec

from leyline_engine.contract import TOKENIZE_PATH, ChatDialect


class RendererDocument(msgspec.Struct, frozen=True):
    """The engine's description of its own rendering."""

    chat_template: str
    """Jinja source; empty if the engine renders in another way."""
    special_tokens: dict[str, str]
    tokenizer_json: str
    dialect: str = ChatDialect.LEYLINE
    takes_parts: bool | None = None
    """True if the template takes lists of parts; None leaves it to the template's source."""
    template_kwargs: dict[str, Any] = {}
    """Template options for requests without any."""
    withholds_tools: bool = False
    """True if the prompt of a request with ``tool_choice: none`` has no tools."""
    tokens_path: str = TOKENIZE_PATH
    """Path of the engine's own tokens of a chat request."""
