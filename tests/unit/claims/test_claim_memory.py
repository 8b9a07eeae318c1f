"""The memory of live claims for the case that the engine is restarted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.contract import Claim, ClaimKind, ClaimState, ClaimStatus, Predicate
from leyline_proxy.claims.memory import ClaimMemory

ENDED = [state for state in ClaimState if not state.lives]
LIVING = [state for state in ClaimState if state.lives]


def status(
    name: str, state: ClaimState = ClaimState.MATERIALIZED, tenant: str = "a"
) -> ClaimStatus:
    """The status of a claim."""
    claim = Claim(
        id=name, tenant=tenant, session="s", kind=ClaimKind.HARD, predicate=Predicate("t", 0, 4)
    )
    return ClaimStatus(claim=claim, state=state, resident_tokens=4, remaining_ms=9)


def names(memory: ClaimMemory) -> list[str]:
    """Ids of what lives, oldest first."""
    return [each.claim.id for each in memory.live()]


def test_what_another_run_doesnt_have_is_harmed() -> None:
    """Claims that both have continue; a first run harms nothing."""
    memory = ClaimMemory()
    assert memory.restart("run-1", [status("kept"), status("gone")]) == ()
    (gone,) = memory.restart("run-2", [status("kept"), status("new")])
    assert (gone.claim.id, gone.state, gone.cause) == (
        "gone",
        ClaimState.HARMED,
        "engine_restarted",
    )
    assert (gone.resident_tokens, gone.remaining_ms) == (0, None)
    assert memory.lost(("a", "gone")) == gone
    assert memory.lost(("a", "kept")) is None and memory.lost(("b", "gone")) is None
    assert names(memory) == ["kept", "new"]


def test_a_harmed_claim_that_is_made_anew_is_harmed_no_more() -> None:
    """The engine's word is the latest."""
    memory = ClaimMemory()
    memory.restart("run-1", [status("c")])
    memory.restart("run-2", [])
    memory.note(status("c"))
    assert memory.lost(("a", "c")) is None
    assert memory.lives(("a", "c"))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([*LIVING, *ENDED])), max_size=30))
def test_what_lives_is_what_was_last_said(said: list[tuple[str, ClaimState]]) -> None:
    """They hold however claims come and go; and a whole list covers all."""
    memory = ClaimMemory()
    last: dict[str, ClaimState] = {}
    for name, state in said:
        memory.note(status(name, state))
        last[name] = state
    assert set(names(memory)) == {name for name, state in last.items() if state.lives}
    memory.update([status("z")], whole=False)
    assert memory.missing([status("z")]) == any(state.lives for state in last.values())
    memory.update([status("z")])
    assert names(memory) == ["z"]
    assert not memory.missing([status("z")])


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 20)), max_size=60))
def test_the_memory_is_bounded_for_each_tenant_and_in_all(claims: list[tuple[str, int]]) -> None:
    """The oldest go first, and one tenant's many don't push out another's few."""
    memory = ClaimMemory(limit=6, limit_of_tenant=4)
    for tenant, number in claims:
        memory.note(status(str(number), tenant=tenant))
        of_tenant = [each for each in memory.live() if each.claim.tenant == tenant]
        assert len(of_tenant) <= 4 and len(memory.live()) <= 6
        assert any(each.claim.id == str(number) for each in of_tenant)
    memory.restart("run-1", memory.live())
    gone = memory.restart("run-2", [])
    assert all(memory.lost((each.claim.tenant, each.claim.id)) for each in gone)
