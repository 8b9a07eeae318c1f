"""A session's replica by weighted rendezvous hashing. Pure.

All proxies with the same names find the same order, without state. Removing one of n equal replicas
moves only its own sessions, about one in n; so does adding one. Thaler & Ravishankar, "Using
name-based mappings to increase hit rates" (1998); the weighted score is Schindelhauer & Schomaker's
logarithmic method (2005).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from hashlib import blake2b

_BITS = 64


def ranked(key: str, weights: Mapping[str, float]) -> list[str]:
    """Return names by their score for ``key``, the best first; equal scores by name.

    Args:
        weights: above 0; a name gets keys in proportion to its weight.
    """
    return sorted(weights, key=lambda name: (-_score(key, name, weights[name]), name))


def _score(key: str, name: str, weight: float) -> float:
    state = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=_BITS // 8)
    state.update(b"\x00" + name.encode("utf-8", "surrogatepass"))
    drawn = (int.from_bytes(state.digest(), "little") + 0.5) / (1 << _BITS)
    # The highest 64-bit values round up to 1 in a double, whose logarithm is 0.
    return weight / -math.log(min(drawn, 1 - 2**-53))
