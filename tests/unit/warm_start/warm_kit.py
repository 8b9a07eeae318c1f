"""Runs of made-up sessions."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable
from typing import Any

from leyline_engine.contract import SpanLabel
from leyline_proxy.warm_start.codec import max_content
from leyline_proxy.warm_start.folder import ManifestFolder
from leyline_proxy.warm_start.manifests import Manifests, max_manifest
from leyline_proxy.warm_start.runs import EngineIdentity, Run
from leyline_proxy.warm_start.sealing import ManifestSeal

KEY = "a key of tests, long enough"
IDENTITY = EngineIdentity("model", "weights", "tokenizer")
TOKENS = 4096
MAX_BYTES = max_content(TOKENS)


def run(tokens: Iterable[int], session: str = "s", **members: Any) -> Run:
    """A run with a label on each half of it."""
    ids = array("q", list(tokens))
    half = len(ids) // 2
    given: dict[str, Any] = {
        "tenant": "t",
        "session": session,
        "identity": IDENTITY,
        "tokens": ids,
        "spans": (SpanLabel("t0.0", 0, half), SpanLabel("t0.1", half, len(ids))),
        "engine": "weights@run",
        "demands": 0,
        "since": 1.5,
        "named": True,
        "at": time.time(),
        **members,
    }
    return Run(**given)


def manifests_in(path: Any, key: str = KEY, tokens: int = TOKENS) -> Manifests:
    """The manifests of a folder."""
    return Manifests(ManifestFolder(path, max_manifest(tokens)), ManifestSeal(key), tokens)
