"""Names of models and adapters that a capability document speaks for."""

from __future__ import annotations

import pytest

from leyline_engine.contract import Capability, Refusal

PLAIN = Capability(
    engine="sglang",
    engine_version="1",
    model="org/m:4b",
    model_fingerprint="f",
    architecture="A",
    vocab_size=1,
    max_context=1,
    splices=False,
)


@pytest.mark.parametrize(
    ("model", "of"),
    [("org/m:4b", True), ("org/m:4b:red", True), ("org/m", False), ("org/m:4bred", False)],
)
def test_an_adapter_is_named_after_its_model(model: str, of: bool) -> None:
    """``base:adapter`` is the model's, also where its own name has a colon; others are not."""
    assert PLAIN.is_of(model) is of


@pytest.mark.parametrize(
    ("refusals", "fix"),
    [
        ((), ""),
        ((Refusal("p", "a"), Refusal("q", "b"), Refusal("r", "a")), "a; b"),
        ((Refusal("p", "a"), Refusal("q")), ""),
    ],
)
def test_a_remedy_is_for_all_that_is_refused(refusals: tuple[Refusal, ...], fix: str) -> None:
    """Each is named once; there is none if one refusal has none."""
    found = Capability(**{**{n: getattr(PLAIN, n) for n in ATTRIBUTES}, "refusals": refusals})
    assert found.unsupported_fix == fix


ATTRIBUTES = PLAIN.__struct_fields__
