"""A turn under way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from leyline_policies.context import Completion

from ..model.asides import Aside, RecalledTexts
from ..plan.planning import Planned
from ..request.identify import Identity
from ..request.parse import ChatRequest
from ..upstream.handshake import UpstreamStatus
from ..upstream.replica import Replica


@dataclass(frozen=True, slots=True)
class Turn:
    """The state of a turn between its plan and its account."""

    request: ChatRequest
    identity: Identity
    index: int
    """Number of the turn in its session, from 0."""
    name: str
    """Name under which the engine retains its tokens."""
    message_id: str
    planned: Planned
    replica: Replica
    """The replica that receives the turn."""
    status: UpstreamStatus
    """Status of the replica when the plan was made."""
    body: bytes
    """The upstream body."""
    enveloped: bool
    """True if the body carries an envelope, so there is a receipt to ask for."""
    unnamed: int
    """The session's losses of account when the plan was made; see ``Session.unnamed``."""
    unvouched: bool
    """True if the session was unvouched then; see ``Session.unvouched``."""
    demands: int
    """Number of the session's demands by then; see ``Session.demands``."""
    untraced: int
    """See ``Session.untraced``."""
    searched: bool
    """True if policies that remove text from the model's view have searched the messages: no other
    part of the request may be sent."""
    applied: list[dict[str, Any]]
    """Effects of the edits of ``context_management``."""
    appended: tuple[Aside, ...] = ()
    """Asides with texts that the request's working set brought back."""
    told: RecalledTexts | None = None
    """The texts that were put back; None if nothing was to be."""
    stranger: str = ""
    """Run of the engine that has answered, if none of the replicas is this engine."""
    asks: Completion | None = None
    """The policy's question that it asks; None for a request of the client."""

    @property
    def place(self) -> str:
        """Name of the engine for the session's places; of a stranger, one that no replica has."""
        return f"?{self.stranger}" if self.stranger else self.replica.name
