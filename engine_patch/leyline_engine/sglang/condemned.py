"""Condemned KV: what a forget reached while a request holds it. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from leyline_engine.sglang.publications import Publication
from leyline_engine.sglang.tree_keys import TreeKeys


@dataclass(slots=True, eq=False)
class Condemned:
    """A path whose part after ``start`` waits for its holders: no request can match it."""

    path: Publication
    start: int
    """Its first slot that may not be found; a page's edge."""


@dataclass(frozen=True, slots=True)
class Unpublished:
    """The fate of the cached part of a path, in tokens."""

    erased: int = 0
    held: int = 0
    """Tokens locked by running requests."""
    shared: int = 0
    """Tokens from which somebody else's path continues."""


def allowed_length(condemned: Iterable[Condemned], keys: array[int], tree_keys: TreeKeys) -> int:
    """Return the number of leading keys that may be matched: no slot of them is condemned."""
    length = len(keys)
    for doomed in condemned:
        if tree_keys.slots_within(tree_keys.common(doomed.path.keys, keys)) > doomed.start:
            length = min(length, tree_keys.keys_of(doomed.start))
    return length
