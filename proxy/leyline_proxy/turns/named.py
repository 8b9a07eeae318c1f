"""Content of other sessions, by name: what a turn asks its engine to look at, and who has it."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from leyline_engine.contract import ProofPlace, common_prefix

from ..model.rendered import MessageSpan
from ..model.session import Session
from ..plan.named import NamedCopies, name_copies, served_extents
from ..plan.outgoing import asks_for_recalls, asks_for_reuse
from ..plan.plan_input import PlanInput
from ..plan.planning import Planned, sink_of
from ..plan.recalled import recalled_extents
from ..sessions.contents import ContentIndex, ContentPlace
from ..telemetry.logging import frames_of
from .ports import TurnObserver
from .settled import SettledTurn

log = structlog.get_logger("leyline.turn")


class NamedSources(TurnObserver):
    """Names copies for turns that ask for reuse, and learns from those that end."""

    def __init__(self, index: ContentIndex) -> None:
        self._index = index

    def copies_for(self, given: PlanInput, planned: Planned, session_id: str) -> NamedCopies:
        """Return the places to name for a turn; a turn that forgets removes its session's."""
        try:
            return self._copies_for(given, planned, session_id)
        except Exception as error:
            _report("naming", error)
            return NamedCopies()

    def _copies_for(self, given: PlanInput, planned: Planned, session_id: str) -> NamedCopies:
        tenant, prompt = given.request.tenant.name, planned.rendered
        if planned.plan.forgets:
            self._index.drop(tenant, session_id)
            return NamedCopies()
        general = asks_for_reuse(given)
        if not (general or asks_for_recalls(given)) or prompt is None:
            return NamedCopies()
        self._index.note(tenant)
        recalled = recalled_extents(planned)
        if not (general or recalled):
            return NamedCopies()
        run, last = given.status.retains_as, given.last
        here = last is not None and last.model_fingerprint == run
        prefix = common_prefix(last.tokens, prompt.tokens) if last is not None and here else 0

        def places_of(span: MessageSpan) -> Sequence[ContentPlace]:
            places = self._index.places(tenant, run, prompt, span)
            if general:
                return places
            # Of a tenant that reuses nothing else, the engine takes the session's own alone.
            is_back = any(start <= span.start and span.end <= end for start, end in recalled)
            return [p for p in places if p.source.session == session_id] if is_back else ()

        return name_copies(
            prompt,
            served_extents(prefix, planned.plan.segments),
            places_of,
            session=session_id,
            sink=sink_of(given.status),
        )

    def drop(self, tenant: str, session_id: str) -> None:
        """Remove a session's places, because it was deleted."""
        self._index.drop(tenant, session_id)

    def left(self, tenant: str, session_id: str) -> ProofPlace:
        """Look for places in a session's turns, by whichever name they are filed."""
        scanned, held = self._index.held(tenant, session_id)
        return ProofPlace(place="contents", scanned=scanned, survivors=held)

    def settled(self, settled: SettledTurn, session: Session) -> None:
        """Learn the places of a session's latest turn, and drop those of turns that are gone."""
        try:
            self._index.put(session)
        except Exception as error:
            _report("learning", error)


def _report(work: str, error: Exception) -> None:
    """Log a failure, which costs names and never the turn."""
    frames = frames_of(error)
    log.error("named_sources_failed", work=work, error=type(error).__name__, frames=frames)
