"""The encryption of compactions that clients carry."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from leyline_proxy.model.compaction import Compacted
from leyline_proxy.sessions.compactions import CompactionSeal

WORDS = "the summary of it all"
WHOLE = Compacted(WORDS, ({"role": "user", "content": "Ask."},), "s-1")
SEAL = CompactionSeal(["one secret of many characters"])
CARRIED = SEAL.close(WHOLE, tenant="red", model="m")


@given(st.text(st.characters(exclude_categories=["Cs"])), st.text(min_size=1), st.text(min_size=1))
def test_what_is_closed_opens(summary: str, tenant: str, model: str) -> None:
    """Any text comes back for its tenant and model, and for no other pair."""
    whole = Compacted(summary, WHOLE.kept, "s")
    carried = SEAL.close(whole, tenant=tenant, model=model)
    assert SEAL.open(carried, tenant=tenant, model=model) == whole
    assert SEAL.open(carried, tenant=f"{tenant}x", model=model) is None
    assert SEAL.open(carried, tenant=tenant, model=f"{model}x") is None
    assert SEAL.open(carried, tenant=tenant + model[:1], model=model[1:]) is None


@given(st.integers(0, len(CARRIED) - 1), st.characters())
def test_a_change_anywhere_is_noticed(place: int, other: str) -> None:
    """No character may change; what opens all the same is what was closed."""
    changed = CARRIED[:place] + other + CARRIED[place + 1 :]
    assert SEAL.open(changed, tenant="red", model="m") in (None, WHOLE)
    if place < len(CARRIED) - 4 and changed != CARRIED and other.isalnum() and other.isascii():
        assert SEAL.open(changed, tenant="red", model="m") is None


@given(st.text())
def test_nothing_else_opens(carried: str) -> None:
    """Any text that wasn't closed here is none."""
    assert SEAL.open(carried, tenant="red", model="m") is None
    assert SEAL.open(f"leyline-compaction-1.{carried}", tenant="red", model="m") is None


def test_the_text_is_hidden_and_keys_differ() -> None:
    """The words aren't in it; another secret doesn't open it, an older one among several does, and
    without secrets each has its own."""
    assert WORDS not in CARRIED
    rotated = CompactionSeal(["a newer secret of many characters", "one secret of many characters"])
    assert rotated.open(CARRIED, tenant="red", model="m") == WHOLE
    own, other = CompactionSeal(), CompactionSeal()
    carried = own.close(WHOLE, tenant="red", model="m")
    assert own.open(carried, tenant="red", model="m") == WHOLE
    for seal in (other, SEAL, CompactionSeal(["a newer secret of many characters"])):
        assert seal.open(carried, tenant="red", model="m") is None
    assert "process" in own.key_origin
    assert "session_secret" in SEAL.key_origin
