"""Turns that ran while Redis was unreachable, remembered until Redis can be informed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ...model.places import MAX_PLACES

MAX_LOSSES = 10_000
"""Most sessions remembered one by one; with more, the loss is one of all sessions."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Turns of a session that are in no account."""

    tenant: str
    session: str
    key: str
    turns: int
    places: Mapping[str, str]
    """Replicas by run, of engines that got the turns."""


class Losses:
    """Losses of account by session, in a bounded number."""

    def __init__(self, limit: int = MAX_LOSSES) -> None:
        self._limit = limit
        self._found: dict[tuple[str, str], Loss] = {}
        self.all = False
        """True if there were too many to remember: any session may have lost something."""

    def __bool__(self) -> bool:
        return bool(self._found) or self.all

    def add(
        self,
        tenant: str,
        session: str,
        key: str = "",
        turns: int = 1,
        places: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Note turns of which an engine may hold KV."""
        if self.all:
            return
        known = self._found.get((tenant, session))
        if known is not None:
            key, turns = known.key or key, known.turns + turns
            places = dict([*known.places.items(), *places.items()][-MAX_PLACES:])
        self._found[tenant, session] = Loss(tenant, session, key, turns, places)
        if len(self._found) > self._limit:
            self.too_many()

    def too_many(self) -> None:
        """Replace the losses, which can't be remembered or written one by one, with one of all."""
        self.all = True
        self._found.clear()

    def turns_of(self, tenant: str, session: str) -> int:
        """Return the turns of a session that are in no account; at least 1 if any may be."""
        known = self._found.get((tenant, session))
        return known.turns if known is not None else int(self.all)

    def oldest(self) -> Loss | None:
        """Return the loss to write next."""
        return next(iter(self._found.values()), None)

    def told(self, loss: Loss) -> None:
        """Note that Redis knows a loss; later additions stay."""
        known = self._found.pop((loss.tenant, loss.session), None)
        if known is not None and known.turns > loss.turns:
            rest = known.turns - loss.turns
            self.add(loss.tenant, loss.session, known.key, rest, known.places)

    def told_all(self) -> None:
        """Note that Redis knows that all sessions lost something."""
        self.all = False
