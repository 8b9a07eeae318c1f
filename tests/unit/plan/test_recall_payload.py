"""The request for reuse of recalled text, by the general mode and by what the engine can."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.claims_engine import renderer
from support.fake_engine import CAPABILITY, MODEL

from leyline_engine.contract import (
    MAX_WITHIN,
    CopySegment,
    Extent,
    ReuseMode,
    ReusePayload,
    SourceRef,
    sealed_digest,
)
from leyline_proxy.model.undeclared import UndeclaredRules
from leyline_proxy.plan.named import NamedCopies
from leyline_proxy.plan.outgoing import asks_for_reuse, reuse_payload
from leyline_proxy.plan.plan_input import PlanInput
from leyline_proxy.request.parse import parse_chat
from leyline_proxy.tenants.tenant import Tenant
from leyline_proxy.upstream.handshake import UpstreamStatus
from leyline_proxy.upstream.proof import Rendering

KEEPS = msgspec.structs.replace(
    CAPABILITY, actions=("leyline.edit@1.0", "leyline.reuse@1.0"), reuse_within=True
)
NAMED = NamedCopies((SourceRef("t1", 9, "digest"),), (CopySegment(0, 0, 5, 40),))
RULES = UndeclaredRules()


def given(reuse: str, capability: Any = KEEPS, **status: Any) -> PlanInput:
    """A turn of a tenant with a mode of reuse."""
    tenant = Tenant("t", (), RULES, True, reuse=reuse, reuse_groups=("g",), reuse_margin=0.5)  # type: ignore[arg-type]
    members = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    request = parse_chat(msgspec.json.encode(members), {}, tenant)
    fields: dict[str, Any] = {"up": True, "capability": capability}
    found = UpstreamStatus(**fields | {"rendering": Rendering(renderer(), proven=True)} | status)
    return PlanInput("t2", request, (), RULES, None, found, 2)


def test_without_general_reuse_only_recalled_text_is_copied() -> None:
    """The payload asks for own KV in these extents, and offers it to no group."""
    payload = reuse_payload(given("off"), NAMED, secret="s", recalled=[(70, 90), (0, 5), (5, 9)])
    assert payload == ReusePayload(
        mode=ReuseMode.LIVE,
        margin=0.5,
        within=((0, 9), (70, 90)),
        own=True,
        sources=(SourceRef("t1", 9, sealed_digest("digest", "s")),),
        copies=NAMED.copies,
    )
    assert not asks_for_reuse(given("off"))


def test_a_turn_that_recalls_nothing_is_only_indexed() -> None:
    """No extent is a payload; a turn of a tenant that never recalls has none."""
    payload = reuse_payload(given("off"), NamedCopies(), recalled=())
    assert payload is not None
    assert (payload.within, payload.own, payload.groups) == ((), True, ())
    assert reuse_payload(given("off"), NAMED) is None


@pytest.mark.parametrize("mode", ["observe", "live"])
@pytest.mark.parametrize("recalled", [None, (), ((70, 90),)])
def test_general_reuse_is_asked_for_as_before(
    mode: str, recalled: tuple[Extent, ...] | None
) -> None:
    """It is in the whole prompt, from all sessions and groups, whatever is recalled."""
    payload = reuse_payload(given(mode), NAMED, recalled=recalled)
    assert payload is not None
    assert (payload.mode, payload.within, payload.own) == (ReuseMode(mode), None, False)
    assert payload.groups == ("g",)


@pytest.mark.parametrize(
    "changes",
    [
        {"capability": msgspec.structs.replace(KEEPS, reuse_within=False)},
        {"capability": msgspec.structs.replace(KEEPS, actions=CAPABILITY.actions)},
        {"capability": msgspec.structs.replace(KEEPS, splices=False)},
        {"capability": None},
        {"up": False},
        {"splicing_allowed": False},
        {"rendering": Rendering()},
    ],
)
def test_an_engine_that_would_copy_everywhere_is_not_asked(changes: dict[str, Any]) -> None:
    """An engine that ignores ``within`` gets no request that relies on it."""
    turn = given("off", **changes)
    assert not turn.status.reuses_within
    assert reuse_payload(turn, NAMED, recalled=((70, 90),)) is None


def test_more_extents_than_an_engine_takes_are_the_longest() -> None:
    """A payload over the limit would be refused with the edit, so short ones are left out."""
    spans = [(10 * at, 10 * at + 1 + at % 7) for at in range(MAX_WITHIN + 40)]
    payload = reuse_payload(given("off"), NAMED, recalled=spans)
    assert payload is not None
    assert payload.within is not None
    assert len(payload.within) == MAX_WITHIN
    assert msgspec.convert(msgspec.to_builtins(payload), ReusePayload) == payload
