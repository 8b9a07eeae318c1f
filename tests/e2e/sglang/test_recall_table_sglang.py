"""The recall table in front of a real SGLang server, with the replies of the replay engine."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.sglang_stack import API_KEY, HINTS_SECRET, SglangServer

from leyline_engine.contract import CAPABILITY_PATH
from leyline_lab.engines.stack import ServedEngine, StackOptions
from leyline_lab.evaluation.composed import ComposedModel
from leyline_lab.evaluation.recalled import RecallArm, RecallOfCut
from leyline_lab.evaluation.replies import Reply

MODEL = "leyline-recall"


def measured(name: str, options: StackOptions) -> dict[str, Any]:
    """The record of one short session without the model's name."""
    table = RecallOfCut([ComposedModel(name, options)], sessions=1, turns=5)
    return dict(table.measure(f"{name}/0"))


@pytest.mark.nightly
def test_sglang_recalls_as_the_replay_engine_does(engine: SglangServer) -> None:
    """Replies and verdicts are equal in every arm: without recall the cut value is looked up, with
    it the model gives it, and its output's KV is copied. SGLang leaves the look-up in the text."""
    headers = {"authorization": f"Bearer {API_KEY}"}
    document = httpx.get(f"{engine.base_url}{CAPABILITY_PATH}", headers=headers).json()
    served = ServedEngine(engine.base_url, API_KEY, HINTS_SECRET, isolates=True)
    found = measured(document["model"], StackOptions(served=served))
    expected = measured(MODEL, StackOptions(model=MODEL, pool_tokens=4096))
    # Engines render tools in ways of their own.
    counts = {f"{arm}|{kind}" for arm in RecallArm for kind in ("prompt", "prefilled")}
    assert {k: v for k, v in found.items() if k not in counts} == {
        k: v for k, v in expected.items() if k not in counts
    }
    (place,) = (
        key.partition("|")[2] for key, shown in found.items() if shown == 0 and "shown" in key
    )
    assert found[f"{RecallArm.TRUNCATE}|{place}"] == Reply.LOOKS_UP
    assert found[f"{RecallArm.RECALL}|{place}"] == Reply.RIGHT
    assert (found[f"{RecallArm.RECALL}|hit"], found[f"{RecallArm.RECALL}|price"]) == (1, 0)
