"""Names in KV events that both sides know."""

from __future__ import annotations

PRIVATE_ID = 1 << 30
"""Flag of an id that means a token under a lineage: no vocabulary reaches it, and numbers of
32 bits hold it, signed ones included."""
