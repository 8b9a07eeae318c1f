"""Demands to forget a session that no turn brings: what quarantines and proofs have in common."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from ..errors import NotFoundError, SessionStoreGoneError
from ..model.session import Session
from ..parts.recallable_parts import RecallableParts
from ..plan.forgetting import texts_named
from ..sessions import SessionStore
from ..sessions.stored_responses import SessionResponses
from .erasure import Erasures
from .named import NamedSources
from .placing import Placing
from .ports import KeptText


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionForgets:
    """Everything that a forget of a session reaches."""

    store: SessionStore
    responses: SessionResponses
    placing: Placing
    erasures: Erasures
    named: NamedSources
    kept: KeptText | None = None
    """Prompt text beside the store."""
    parts: RecallableParts | None = None
    """Evicted texts that can be recalled."""

    async def session(self, tenant: str, session_id: str) -> Session:
        """Return a session that has been answered.

        Raises:
            NotFoundError: the tenant has no such session.
            SessionStoreGoneError: the store can't be asked.
        """
        found = await self.store.get(tenant, session_id)
        self.check_store()
        if found is None or not found.answered:
            raise no_session()
        return found

    async def change(
        self, tenant: str, session_id: str, change: Callable[[Session], Session]
    ) -> tuple[Session, Session]:
        """Change a session; return it as it was, and as it is now. Raises as :meth:`session`."""
        before: list[Session] = []

        def changed(now: Session | None) -> Session:
            if now is None:
                raise no_session()
            before[:] = [now]
            return change(now)

        try:
            after = await self.store.update(tenant, session_id, changed)
        except NotFoundError:
            self.check_store()  # without it, no session is known
            raise
        self.check_store()
        return before[0], after

    async def remove_texts(self, before: Session, after: Session, spans: Collection[str]) -> None:
        """Remove what the proxy keeps of a session's text beside the store.

        Args:
            spans: names of the messages that are forgotten for good; without any, all are.
        """
        owner = (before.tenant, before.id)
        if self.parts is not None:
            await self.parts.bar(owner, texts_named(before, spans), demands=before.demands)
        if self.kept is not None and after.demands > before.demands:
            await self.kept.forget(*owner, "", before.demands)

    def check_store(self) -> None:
        """Raise SessionStoreGoneError if the store can't be asked."""
        if self.store.problem is not None:
            raise SessionStoreGoneError


def no_session() -> NotFoundError:
    """Return the error for a session that the tenant doesn't have."""
    return NotFoundError("No such session; it may have expired.", code="session_not_found")
