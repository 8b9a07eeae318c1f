"""Edits on models with recurrent layers: whose word holds, and what is planned under each."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from support.character_turns import ANYTHING, plan_of, turn_of
from support.claims_engine import renderer
from support.fake_engine import CAPABILITY, MODEL

from leyline_engine.contract import (
    CopySegment,
    Directive,
    KVFacts,
    LineageRun,
    LiteralSegment,
    Mode,
    Outcome,
    Reason,
    RecurrentEdits,
    SourceRef,
    StateFacts,
)
from leyline_proxy.edits.prepare import prepare
from leyline_proxy.edits.rules import PolicyCatalog, effective_rules
from leyline_proxy.errors import ForbiddenError
from leyline_proxy.plan.outgoing import edit_payload
from leyline_proxy.plan.plan_input import PlanInput
from leyline_proxy.plan.planning import decide
from leyline_proxy.plan.synthesis import TurnPlan
from leyline_proxy.request.parse import ChatRequest, parse_chat
from leyline_proxy.settings import Settings
from leyline_proxy.tenants.tenant import build_tenant
from leyline_proxy.upstream.handshake import UpstreamStatus
from leyline_proxy.upstream.proof import Rendering

KEPT, EXACT = RecurrentEdits.KEPT, RecurrentEdits.EXACT
STATE = StateFacts(recurrent_layers=3, edits="kept", bytes_per_state=6400, slots=40)
HYBRID = msgspec.structs.replace(
    CAPABILITY,
    state=STATE,
    kv=KVFacts(pool_class="gqa", dtype="f", layers=1, bytes_per_token=2, capacity_tokens=9),
)


def status(capability: Any = HYBRID) -> UpstreamStatus:
    """The state of an engine that splices."""
    proven = Rendering(renderer(), proven=True)
    return UpstreamStatus(up=True, capability=capability, rendering=proven)


def request_of(settings: dict[str, Any], **options: Any) -> ChatRequest:
    """A request of the tenant ``t``."""
    messages = [{"role": "user", "content": "Hi"}]
    members = {"model": MODEL, "messages": messages, "leyline": options}
    return parse_chat(msgspec.json.encode(members), {}, build_tenant("t", Settings(**settings)))


def given(request: ChatRequest, capability: Any = HYBRID) -> PlanInput:
    """The request as a turn."""
    rules = request.tenant.undeclared
    return PlanInput("t2", request, (), rules, None, status(capability), 2)


@pytest.mark.parametrize(
    ("proxy", "tenant", "asked", "expected"),
    [
        (None, None, None, KEPT),
        ("exact", None, None, EXACT),
        ("exact", "kept", None, KEPT),
        ("kept", "exact", None, EXACT),
        ("kept", "exact", "kept", KEPT),
        ("exact", None, "kept", KEPT),
        (None, None, "exact", EXACT),
    ],
)
def test_the_most_specific_word_holds(
    proxy: str | None, tenant: str | None, asked: str | None, expected: RecurrentEdits
) -> None:
    """Proxy, tenant and request, in this order; a model without recurrent layers needs none."""
    settings: dict[str, Any] = {"recurrent_edits": proxy} if proxy else {}
    if tenant:
        settings["tenants"] = {"t": {"recurrent_edits": tenant}}
    request = request_of(settings, **({"recurrent_edits": asked} if asked else {}))
    assert given(request).recurrent is expected
    for capability in (CAPABILITY, msgspec.structs.replace(CAPABILITY, state=StateFacts(window=9))):
        assert given(request, capability).recurrent is None


def test_an_operator_may_fix_the_promise() -> None:
    """A tenant whose requests may not choose refuses the member by name."""
    fixed = {"recurrent_edits": "exact", "allow_request_policy": False}
    request = request_of(fixed, recurrent_edits="kept")
    with pytest.raises(ForbiddenError, match="recurrent_edits"):
        asyncio.run(effective_rules(request, PolicyCatalog()))
    asyncio.run(effective_rules(request_of(fixed), PolicyCatalog()))


PLAN = TurnPlan(
    sources=(SourceRef("t1", 90, "d"),),
    directives=(
        Directive(10, 20, (), Mode.AMORTIZE, 0),
        Directive(70, 80, (), Mode.FORGET, 0),
    ),
    segments=(CopySegment(0, 0, 10, 0), CopySegment(0, 20, 70, 10), LiteralSegment(60, 30)),
    lineage=(LineageRun(5, "l"),),
    forget=("s1",),
    planned=Outcome.SPLICED,
    reason=Reason.SPLICED,
    reusable_tokens=60,
)


def test_exact_plans_no_splice_and_still_forgets() -> None:
    """The edit is prefilled for a named reason, continues no earlier splice, and loses no demand;
    under kept, and on other models, the plan is what it was."""
    exact = decide(PLAN, status(), EXACT)
    assert (exact.planned, exact.reason) == (Outcome.REPREFILLED, Reason.RECURRENT_STATE)
    assert exact.directives == PLAN.directives[1:] and exact.forget == PLAN.forget
    assert exact.segments == (LiteralSegment(0, 90),) and not exact.lineage
    assert decide(PLAN, status(), KEPT) is decide(PLAN, status()) is PLAN
    silent = replace(PLAN, directives=(), segments=(), forget=(), planned=Outcome.UNEDITED)
    continued = decide(silent, status(), EXACT)
    assert (continued.reason, continued.lineage) == (Reason.RECURRENT_STATE, ())
    fresh = replace(silent, lineage=(), reason=None)
    assert decide(fresh, status(), EXACT) is fresh


def test_the_engine_gets_the_promise() -> None:
    """A turn whose states are to be exact takes part in no scope of others' splices."""
    request = request_of({"tenants": {"t": {"share": "team"}}})
    sent = {
        mode: edit_payload(request, "s", "t2", TurnPlan(), 0, recurrent=mode)
        for mode in (KEPT, EXACT, None)
    }
    assert [sent[mode].recurrent for mode in (KEPT, EXACT, None)] == [KEPT, EXACT, EXACT]
    assert [sent[mode].share for mode in (KEPT, EXACT, None)] == ["team", "", "team"]


def test_a_splice_pays_for_its_state() -> None:
    """An edit that other models splice is prefilled if it moves fewer tokens than a state costs."""
    talk = [{"role": "user", "content": text} for text in ("s" * 40, "observed " * 9, "k" * 60)]
    cut = [talk[0], {**talk[1], "content": "…"}, talk[2], {"role": "user", "content": "more"}]
    source, edited = turn_of(talk), prepare(cut, [], [], 1)
    found = {
        overhead: plan_of([source], edited, ANYTHING, overhead=overhead) for overhead in (0, 64)
    }
    assert found[0].planned is Outcome.SPLICED
    assert (found[64].planned, found[64].reason) == (Outcome.REPREFILLED, Reason.NOT_WORTH_IT)
