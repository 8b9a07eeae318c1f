"""The messages to send in a turn, and the decision on edits that could wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from leyline_policies import Policy
from leyline_policies.context import TOKENS
from leyline_policies.verbs import Verbs

from ..errors import BadRequestError, PolicyFailedClosedError, ProxyError
from ..model.prepared import PolicyFault, Prepared, Quarantined
from ..model.session import RetainedTurn, Session
from ..model.vocabulary import Decision
from ..request.parse import ChatRequest
from ..telemetry.metrics import Metrics
from ..upstream.handshake import UpstreamStatus
from .fault_origins import FaultLog
from .materialised import Recall
from .policy_facts import known_objects
from .prepare import PolicySession, prepare, unedited
from .schedule import Timing, schedule

log = structlog.get_logger("leyline.turn")


@dataclass(frozen=True, slots=True)
class EditInput:
    """The part of a turn that determines its messages."""

    request: ChatRequest
    policies: Sequence[Policy]
    session: Session | None
    """None for a new one."""
    status: UpstreamStatus
    """Status of the engine that the turn is for."""
    index: int
    """Number of the turn in its session."""
    condemned: Mapping[int, Quarantined] = field(default_factory=dict)
    """Messages that the session has in quarantine, by index in the client's list."""
    recall: Recall = field(default_factory=Recall)

    @property
    def erratum(self) -> str:
        """The note that shortened messages end with; empty if the engine doesn't splice."""
        profile = self.status.profile
        return profile.erratum if profile is not None and self.status.splices else ""

    @property
    def last(self) -> RetainedTurn | None:
        """The session's last turn."""
        return self.session.last if self.session is not None else None


@dataclass(frozen=True, slots=True)
class Edited:
    """The messages to send."""

    prepared: Prepared
    decision: Decision | None = None
    """The decision on edits that could wait; None if none does."""


def edit(
    given: EditInput,
    facts: PolicySession,
    timing: Timing | None,
    metrics: Metrics,
    faults: FaultLog,
) -> Edited:
    """Apply policies and the request's own edits.

    Args:
        facts: the session, as far as policies may know it.
        timing: the rules for edits that wait; None if none does.
        faults: gets the policies' faults.

    Raises:
        PolicyFailedClosedError, BadRequestError: the request must not be sent.
    """
    request = given.request
    with metrics.stage("policy"):
        last = given.last.prepared if given.last is not None else None
        messages = known_objects(request.messages, request.fingerprints, last)
        edited_by = given.policies or request.annotations or request.options.edits
        if not (edited_by or given.condemned or given.recall.told or given.recall.shelf):
            return Edited(unedited(messages, request.fingerprints))
        prepared = prepare(
            messages,
            given.policies,
            request.options.edits,
            given.index,
            fingerprints=request.fingerprints,
            session=facts,
            condemned=given.condemned,
            erratum=given.erratum,
            recall=given.recall,
        )
        for fault in prepared.faults:
            faults.add(fault, request.tenant.name)
        if prepared.refused is not None:
            raise _refusal(given, prepared, prepared.refused, metrics)
        return _timed(given, facts, timing, prepared)


def _refusal(
    given: EditInput, prepared: Prepared, refused: PolicyFault, metrics: Metrics
) -> ProxyError:
    """Return the error of a refused request, and count it here: there won't be a turn."""
    for fault in prepared.faults:
        counter = metrics.policy_refusals if fault is refused else metrics.policy_faults
        counter.labels(fault.policy, fault.fault).inc()
    tenant = given.request.tenant.name
    log.error("policy_failed_closed", tenant=tenant, policy=refused.policy, fault=refused.fault)
    if refused.policy != Verbs.name:
        return PolicyFailedClosedError(refused.policy, refused.fault)
    return BadRequestError(
        f"What messages say of themselves (leyline.forget) can't be done ({refused.fault}): "
        "without them there would be no conversation to send.",
        param="messages",
    )


def _timed(
    given: EditInput, facts: PolicySession, timing: Timing | None, prepared: Prepared
) -> Edited:
    """Return the turn with the edits that pay now."""
    last = given.last
    if timing is None or not given.policies or last is None:
        return Edited(prepared)
    if last.model_fingerprint != given.status.retains_as:
        return Edited(prepared)  # nothing is cached, so an edit costs nothing
    held, decision = schedule(
        last.prepared,
        prepared,
        facts.cost,
        timing,
        tokens=lambda message: facts.memo.get(message, TOKENS, facts.count),
        turns=given.index,
        window=facts.window,
    )
    return Edited(held, decision)
