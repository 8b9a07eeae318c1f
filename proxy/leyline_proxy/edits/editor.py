"""The editor of turns: runs policies with the facts for them, memos, costs, sensitive content."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

from leyline_engine.contract import RecurrentEdits
from leyline_policies.builtin.redact import Redact
from leyline_policies.faults import OnFault

from ..telemetry.metrics import Metrics
from .costs import CostBooks
from .editing import Edited, EditInput, edit
from .fault_origins import FaultLog
from .policy_facts import PolicyMemos, policy_session, renderer_of
from .prepare import PolicySession
from .rules import recurrent_edits
from .schedule import Timing
from .sensitive import sensitive_rule
from .time_limit import TimeLimit


class Editor:
    """Edits the messages of turns. Safe to use from several threads.

    Args:
        timing: rules for waiting edits; None if none waits.
        sensitive: content that is forgotten whichever policy removes it.
        on_fault: action after a fault of a policy that forgets.
    """

    def __init__(
        self,
        metrics: Metrics,
        costs: CostBooks,
        *,
        policy_timeout_s: float,
        timing: Timing | None,
        sensitive: Redact | None,
        on_fault: OnFault = "refuse",
    ) -> None:
        self._metrics = metrics
        self._costs = costs
        self._timing = timing
        self._sensitive = sensitive
        self._on_fault = on_fault
        self.memos = PolicyMemos()
        self._faults = FaultLog()
        self._time_limit = TimeLimit(policy_timeout_s)

    def edit(
        self, given: EditInput, session_id: str | None, *, only_forgets: bool = False
    ) -> Edited:
        """Return the messages to send.

        Args:
            session_id: None for an unknown session.
            only_forgets: run only the policies that remove what must not reach the model.

        Raises:
            PolicyFailedClosedError, BadRequestError: the request must not be sent.
        """
        request, status = given.request, given.status
        recalls = given.recall.told or given.recall.shelf
        if not (given.policies or request.annotations or recalls):
            return edit(given, PolicySession(), None, self._metrics, self._faults)
        renderer = renderer_of(status, request.model)
        exact = status.recurrent and recurrent_edits(request) is RecurrentEdits.EXACT
        splices = status.splices and not exact
        reader = request.reader._replace(session=session_id or "")
        with self.memos.of(reader, given.policies, renderer) as memo:
            facts = policy_session(
                given.session,
                status,
                request,
                cost=self._costs.cost(request.model, splices=splices, capability=status.capability),
                memo=memo,
                limit=partial(self._time_limit, request.tenant.name),
                sensitive=sensitive_rule(self._sensitive, memo),
                on_fault=self._on_fault,
                now=time.time(),
            )
            # Edits that a request asks for don't wait.
            timing = None if request.requested or only_forgets else self._timing
            facts = replace(facts, only_forgets=only_forgets)
            return edit(given, facts, timing, self._metrics, self._faults)
