"""The composed ablation in front of a real SGLang server, with the replies of the replay engine."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.sglang_stack import API_KEY, HINTS_SECRET, SglangServer

from leyline_engine.contract import CAPABILITY_PATH, FidelityProfile
from leyline_lab.engines.stack import ServedEngine, StackOptions
from leyline_lab.errors import SubjectError
from leyline_lab.evaluation.composed import (
    POLICIES,
    Composed,
    ComposedArm,
    ComposedModel,
)

MODEL = "leyline-recall"


def measured(name: str, options: StackOptions) -> dict[str, Any]:
    """The record of one session without the model's name."""
    profile = FidelityProfile(model=name, boundary=1, quotes=3)
    composed = Composed([ComposedModel(name, options)], lambda: [profile], sessions=1, turns=14)
    return dict(composed.measure(f"{name}/{POLICIES[2]}/0"))


@pytest.mark.nightly
def test_sglang_replies_as_the_replay_engine_does(engine: SglangServer) -> None:
    """In every arm, twice, as no run finds anything of another's; splices prefill less. Without the
    secret, nothing is measured."""
    headers = {"authorization": f"Bearer {API_KEY}"}
    document = httpx.get(f"{engine.base_url}{CAPABILITY_PATH}", headers=headers).json()
    assert document["isolates"]
    served = ServedEngine(engine.base_url, API_KEY, HINTS_SECRET, isolates=True)
    expected = measured(MODEL, StackOptions(model=MODEL, pool_tokens=4096))
    first, second = (measured(document["model"], StackOptions(served=served)) for _ in range(2))
    assert first == second
    # Engines render tools in ways of their own.
    counts = {f"{arm}|{kind}" for arm in ComposedArm for kind in ("prompt", "prefilled")}
    assert {k: v for k, v in first.items() if k not in counts} == {
        k: v for k, v in expected.items() if k not in counts
    }
    again, splice, profile = (int(first[f"{arm}|prefilled"]) for arm in ComposedArm)
    assert splice < profile < again
    assert len({first[f"{arm}|prompt"] for arm in ComposedArm}) == 1
    with pytest.raises(SubjectError, match="invalid_edit"):
        unsigned = ServedEngine(engine.base_url, API_KEY, None, isolates=True)
        measured(document["model"], StackOptions(served=unsigned))
