"""What ran while Redis was out of reach, until Redis can be told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ...model.places import MAX_PLACES

MAX_LOSSES = 10_000
"""Sessions remembered one by one; beyond that the loss is one of all sessions."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Turns of a session that no account names."""

    tenant: str
    session: str
    key: str
    turns: int
    places: Mapping[str, str]
    """Replicas by run, of engines that were given them."""


class Losses:
    """Losses of account by session, bounded."""

    def __init__(self, limit: int = MAX_LOSSES) -> None:
        self._limit = limit
        self._found: dict[tuple[str, str], Loss] = {}
        self.all = False
        """They were too many to remember: any session may have lost something."""

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
        """Note turns that an engine may hold something of."""
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
        """They can't be remembered, or told, one by one."""
        self.all = True
        self._found.clear()

    def oldest(self) -> Loss | None:
        """The one to tell next."""
        return next(iter(self._found.values()), None)

    def told(self, loss: Loss) -> None:
        """Redis knows of it; what was added meanwhile stays."""
        known = self._found.pop((loss.tenant, loss.session), None)
        if known is not None and known.turns > loss.turns:
            rest = known.turns - loss.turns
            self.add(loss.tenant, loss.session, known.key, rest, known.places)

    def told_all(self) -> None:
        """Redis knows that all sessions lost something."""
        self.all = False
