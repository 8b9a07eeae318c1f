"""An index of sessions by the beginnings of their conversations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

_Holders = tuple[str, ...]


class HistoryIndex:
    """Sessions of a tenant and store key by the hash of messages 0..i."""

    def __init__(self) -> None:
        self._tables: dict[tuple[str, str], dict[int, _Holders]] = {}

    def holders(self, tenant: str, key: str, value: int) -> _Holders:
        """Return the sessions whose chain contains ``value``, in order of insertion."""
        return self._tables.get((tenant, key), {}).get(value, ())

    def replace(
        self, tenant: str, session: str, key: str, old: Sequence[int], new: Sequence[int]
    ) -> None:
        """Replace one chain of a session with another; their common prefix stays untouched."""
        same = sum(1 for _ in takewhile(bool, map(int.__eq__, old, new)))
        self.remove(tenant, session, key, old[same:])
        if len(new) == same:
            return
        table = self._tables.setdefault((tenant, key), {})
        # Most values have one holder: all values of a session share one tuple.
        alone = table.get(new[same - 1], ()) if same else ()
        alone = alone if len(alone) == 1 else (session,)
        for value in new[same:]:
            holders = table.get(value)
            table[value] = alone if holders is None else (*holders, session)

    def remove(self, tenant: str, session: str, key: str, chain: Sequence[int]) -> None:
        """Remove a session's chain."""
        table = self._tables.get((tenant, key))
        if table is None:
            return
        for value in chain:
            rest = tuple(holder for holder in table.get(value, ()) if holder != session)
            if rest:
                table[value] = rest
            else:
                table.pop(value, None)
        if not table:
            del self._tables[tenant, key]
