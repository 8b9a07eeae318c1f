"""What the pipeline reports to, as interfaces: it knows none of those that listen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from leyline_engine.contract import Receipt

from ..audit.followup import Ask
from ..model.session import Session
from .settled import SettledTurn
from .turn import Turn


class TurnObserver(Protocol):
    """Looks on at the ends of turns."""

    def settled(self, settled: SettledTurn, session: Session) -> None:
        """A turn was answered in full.

        Args:
            session: after the turn.
        """

    def refused(self, turn: Turn, receipt: Receipt, model: str) -> None:
        """The engine didn't run a turn, or not to its end, for the sake of claims.

        Args:
            model: as a metric label.
        """

    def abandoned(self, turn: Turn, model: str) -> None:
        """A turn's client left, or its answer broke off. Refused turns are abandoned, too.

        Args:
            model: as a metric label.
        """


class PinRefusals(Protocol):
    """Pins of messages that no engine took."""

    def refusals(self, turn: Turn) -> list[dict[str, Any]]:
        """The refused pins of a turn, for its account."""

    async def aclose(self) -> None:
        """Give up what runs beside the requests."""


class EngineLog(Protocol):
    """A lasting record of what engines did beside the turns."""

    @property
    def on(self) -> bool:
        """Whether anything is recorded."""

    def carried(self, tenant: str, session: str, engine: str, result: str) -> None:
        """Record what became of a forget that was carried to another engine.

        Args:
            engine: model and run, as ``UpstreamStatus.retains_as`` names it.
            result: ``erased``, ``gone``, ``lost`` or ``pending``.
        """

    def held(self, owner: tuple[str, str], engine: str, receipt: Receipt, ask: Ask) -> None:
        """Record that an engine confirmed a forget of which running requests hold some, and when
        they have ended.

        Args:
            owner: tenant and session.
            receipt: the engine's, of the request that carried the forget.
            ask: asks the engine for its record.
        """

    def claims(self, engine: str, events: Sequence[Mapping[str, Any]]) -> None:
        """Record events of one run of an engine."""

    def position(self, engine: str) -> int | None:
        """The number of the newest recorded event of one run of an engine; None for none."""
