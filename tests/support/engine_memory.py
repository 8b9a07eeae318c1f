"""An embedded engine's memory of a session, read from its radix tree."""

from __future__ import annotations

import httpx
from starlette.applications import Starlette
from tokenizers import Tokenizer

from leyline_engine.contract import RENDERER_PATH

EXACT_KEYS = 1 << 24
"""Radix keys from here on are private to a lineage: their KV was spliced, or read what was."""


def learn_words(app: Starlette, origin: str) -> None:
    """Fetch the tokenizer that :func:`held` reads tokens with."""
    document = httpx.get(f"{origin}{RENDERER_PATH}").json()["tokenizer_json"]
    app.state.words = Tokenizer.from_str(document)


def held(app: Starlette, session: str, tenant: str = "default") -> list[tuple[str, bool]]:
    """The session's content of the tree: each path's text, and if its end was ever spliced."""
    engine, owner = app.state.service._engine, (tenant, session)
    paths = []
    for node in engine.cache.tree.nodes():
        if owner in node.owners and not any(
            owner in child.owners for child in node.children.values()
        ):
            run, keys = node, []
            while run is not None:
                keys = [*run.keys, *keys]
                run = run.parent
            text = app.state.words.decode([key % EXACT_KEYS for key in keys])
            paths.append((text, keys[-1] >= EXACT_KEYS))
    return paths


def holds_text(app: Starlette, session: str, text: str, tenant: str = "default") -> bool:
    """Return True if the engine holds KV of ``text`` for a session."""
    return any(text in path for path, _ in held(app, session, tenant))
