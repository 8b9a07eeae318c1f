"""Interfaces that the pipeline reports to; it knows none of their implementations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from leyline_engine.contract import ProofPlace, Receipt

from ..audit.followup import Ask
from ..model.derived import Derived
from ..model.session import Session
from ..model.verdicts import Verdict
from .settled import SettledTurn
from .turn import Turn


class TurnObserver:
    """An observer of the ends of turns; by default, it ignores them."""

    def settled(self, settled: SettledTurn, session: Session) -> None:
        """Receive a turn that was answered in full.

        Args:
            session: its state after the turn.
        """

    def refused(self, turn: Turn, receipt: Receipt, model: str) -> None:
        """Receive a turn that the engine didn't run, or not to its end, because of claims.

        Args:
            model: as a metric label.
        """

    def abandoned(self, turn: Turn, model: str) -> None:
        """Receive a turn whose client left, or whose answer broke off; refused turns, too.

        Args:
            model: as a metric label.
        """


class TurnWatch(Protocol):
    """A watcher of turns under way, in case that this process dies."""

    def begun(self, turn: Turn) -> None:
        """Receive a turn that is about to be sent."""

    def ended(self, turn: Turn) -> None:
        """Receive a turn that is over, whatever became of it; after every observer."""


class PinRefusals(Protocol):
    """Pins of messages that no engine accepted."""

    def refusals(self, turn: Turn) -> list[dict[str, Any]]:
        """Return the refused pins of a turn, for its account."""

    async def aclose(self) -> None:
        """Cancel the work that runs alongside the requests."""


class QuarantineLog(Protocol):
    """A lasting record of verdicts that no turn brought."""

    def quarantined(
        self,
        tenant: str,
        session: str,
        verdict: Verdict,
        *,
        reason: str,
        owed: Sequence[str],
        derived: Derived | None = None,
    ) -> None:
        """Record a message that was put into quarantine on demand.

        Args:
            reason: a word from a list.
            owed: engines that have to forget it, as ``UpstreamStatus.retains_as`` names them.
            derived: texts that are derived from the demand's messages; given with one of them.
        """


class EngineLog(Protocol):
    """A lasting record of the engines' actions apart from turns."""

    @property
    def on(self) -> bool:
        """True if anything is recorded."""

    def carried(self, tenant: str, session: str, engine: str, result: str) -> None:
        """Record the result of a forget that was carried to another engine.

        Args:
            engine: model and run, as ``UpstreamStatus.retains_as`` names it.
            result: ``erased``, ``gone``, ``lost`` or ``pending``.
        """

    def held(self, owner: tuple[str, str], engine: str, receipt: Receipt, ask: Ask) -> None:
        """Record a confirmed forget of KV that running requests still hold, and later their end.

        Args:
            owner: tenant and session.
            receipt: the engine's, of the request that carried the forget.
            ask: asks the engine for its record.
        """

    def claims(self, engine: str, events: Sequence[Mapping[str, Any]]) -> None:
        """Record events of one run of an engine."""

    def position(self, engine: str) -> int | None:
        """Return the number of the newest recorded event of one run of an engine; None for none."""


class KeptText(Protocol):
    """Prompt text that is kept beside the session store."""

    async def forget(self, tenant: str, session: str, turn: str, demands: int) -> None:
        """Remove all of a session, before a turn that demands a forget is sent. Never raises.

        Args:
            turn: the turn's name; empty for a demand that no turn carries.
            demands: the session's demands before; see ``Session.demands``.
        """

    async def delete(self, tenant: str, session: str) -> None:
        """Remove all of a session that is deleted. Never raises."""

    async def left(self, tenant: str, session: str, demands: int) -> Sequence[ProofPlace]:
        """Look for a session's text after :meth:`forget`, in memory and at rest. Never raises.

        Args:
            demands: the session's demands after it; text with more was sent again.
        """


class ProofLog(Protocol):
    """A lasting record of proofs, and the key that signs them."""

    def proven(self, proof: Mapping[str, Any]) -> dict[str, Any]:
        """Record a proof, and return it with its signature if there is a key."""
