"""All inputs of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leyline_engine.contract import RecurrentEdits
from leyline_policies import Policy

from ..edits.editing import EditInput
from ..edits.materialised import Recall, Shelf
from ..edits.rules import recurrent_edits
from ..model.asides import Aside, RecalledTexts
from ..model.session import RetainedTurn, Session
from ..model.undeclared import UndeclaredRules
from ..request.parse import ChatRequest
from ..request.resemblance import offers_tools
from ..upstream.handshake import UpstreamStatus


@dataclass(frozen=True, slots=True)
class PlanInput:
    """All inputs of a plan."""

    turn: str
    """The turn's name."""
    request: ChatRequest
    policies: Sequence[Policy]
    rules: UndeclaredRules
    session: Session | None
    status: UpstreamStatus
    index: int
    """Number of the turn in its session."""
    replica: str = ""
    """Name of the intended upstream."""
    named: bool = True
    """True if the caller gave the session its id."""
    traced: bool = True
    """True if earlier turns of a session unknown here can be found by its id."""
    before: Session | None = None
    """The session that a new one continues under another id; for the account alone."""
    told: RecalledTexts | None = None
    """Evicted texts to put back; None if nothing may be."""
    appended: tuple[Aside, ...] = ()
    """Asides of this turn, with texts that its working set brings back."""
    shelf: Shelf | None = None
    """The request's working set, and the store; None if it names none."""
    retells: bool = False
    """True if the request is a transcript of the session, to be summarised."""
    demanded: tuple[str, ...] = ()
    """Names that the turn forgets whatever its list shows."""

    @property
    def edits(self) -> EditInput:
        """The part that the messages to send depend on."""
        asked = self.request, self.policies, self.session, self.status, self.index
        asides = (*(self.session.asides if self.session else ()), *self.appended)
        return EditInput(*asked, recall=Recall(asides, self.told, self.shelf))

    @property
    def recurrent(self) -> RecurrentEdits | None:
        """The promise about the model's recurrent states; None if it has none."""
        return recurrent_edits(self.request) if self.status.recurrent else None

    @property
    def last(self) -> RetainedTurn | None:
        """The latest turn of the conversation; None if there is none."""
        return next((turn for turn in reversed(self.comparable) if not turn.is_apart), None)

    @property
    def retained(self) -> tuple[RetainedTurn, ...]:
        return self.session.turns if self.session else ()

    @property
    def comparable(self) -> tuple[RetainedTurn, ...]:
        """Retained turns that the prompt may continue, or quote: of one name, a request for a title
        is no part of an agent's work, and a transcript continues nothing."""
        if self.retells:
            return ()
        if self.rules.trust != "opening" or not offers_tools(self.request):
            return self.retained
        return tuple(turn for turn in self.retained if not turn.is_lone or turn.retells)
