"""A turn under way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..plan.planning import Planned
from ..request.identify import Identity
from ..request.parse import ChatRequest
from ..upstream.handshake import UpstreamStatus
from ..upstream.replica import Replica


@dataclass(frozen=True, slots=True)
class Turn:
    """Everything between the plan and the account."""

    request: ChatRequest
    identity: Identity
    index: int
    """Number of the turn in its session, from 0."""
    name: str
    """Under which the engine retains its tokens."""
    message_id: str
    planned: Planned
    replica: Replica
    """Where it is sent."""
    status: UpstreamStatus
    """Of the replica when the plan was made."""
    body: bytes
    """What goes upstream."""
    enveloped: bool
    """Whether the body carries an envelope, so that there is a receipt to ask for."""
    unnamed: int
    """The session's losses of account when the plan was made; see ``Session.unnamed``."""
    unvouched: bool
    """The same; see ``Session.unvouched``."""
    demands: int
    """What had been demanded in the session by then; see ``Session.demands``."""
    untraced: int
    """See ``Session.untraced``."""
    searched: bool
    """Whether policies that take out what the model must not see have looked at the messages: no
    more of the request may be sent than they have seen."""
    applied: list[dict[str, Any]]
    """What the edits of ``context_management`` did."""
    own_s: float = 0.0
    """Seconds that the proxy itself has spent on it so far, other attempts included."""
    ahead_s: float = 0.0
    """Seconds from the request's arrival until this engine's turn came: its wait for a place,
    engines that failed it, and the proxy's own time."""
