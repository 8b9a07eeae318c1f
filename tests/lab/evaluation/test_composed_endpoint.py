"""The composed ablation in front of a running engine: the figures of an engine in this process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
from support.http_thread import serving

from leyline_engine.contract import FidelityProfile
from leyline_lab.engines.stack import ServedEngine, StackOptions
from leyline_lab.errors import SubjectError
from leyline_lab.evaluation.composed import (
    POLICIES,
    Composed,
    ComposedArm,
    ComposedModel,
)
from leyline_replay.factory import serve_model
from leyline_replay.http.app import ServingOptions
from leyline_replay.models.loader import load_model

MODEL = "leyline-recall"
POOL = 4096
CASE = f"{MODEL}/{POLICIES[2]}/0"
KEY, SECRET = "the engine's key", "the secret of proxy and engine"


def measured(options: StackOptions) -> dict[str, Any]:
    """The record of one short session."""
    profile = FidelityProfile(model=MODEL, boundary=1, quotes=3)
    models = [ComposedModel(MODEL, options)]
    return dict(Composed(models, lambda: [profile], sessions=1, turns=9).measure(CASE))


@lru_cache(maxsize=1)
def expected() -> dict[str, Any]:
    """The record of an engine in this process."""
    return measured(StackOptions(model=MODEL, pool_tokens=POOL))


@pytest.fixture(scope="module")
def served() -> Iterator[ServedEngine]:
    """A replay engine over HTTP, with a key and a secret."""
    options = ServingOptions(api_secret=KEY, hints_secret=SECRET)
    app = serve_model(load_model(MODEL, device="cpu"), pool_tokens=POOL, options=options)
    with serving(app) as server:
        yield ServedEngine(server.url, KEY, SECRET)
    app.state.shutdown()


@pytest.mark.nightly
def test_an_engine_at_an_address_has_the_figures_of_one_in_this_process(
    served: ServedEngine,
) -> None:
    """Every reply and every count of tokens is equal in all arms, also when the engine holds KV of
    an earlier run."""
    for _ in range(2):
        found = measured(StackOptions(served=served))
        assert found == expected()
    assert found[f"{ComposedArm.SPLICE}|prefilled"] < found[f"{ComposedArm.REPREFILL}|prefilled"]


def test_an_engine_that_refuses_its_edits_isn_t_measured(served: ServedEngine) -> None:
    """Without the secret all arms would re-prefill, and without the key none would be served."""
    with pytest.raises(
        SubjectError, match=rf"{MODEL}, .*, splice: .*doesn't splice .*invalid_edit"
    ):
        measured(StackOptions(served=replace(served, hints_secret=None)))
    with pytest.raises(SubjectError, match=f"{MODEL}, .*re-prefill: .*not flushed"):
        measured(StackOptions(served=replace(served, api_key=None)))


def test_only_the_stack_s_own_tenant_is_served(served: ServedEngine) -> None:
    """Its proxy wants the tenant's key, and the engine's KV is kept apart where it can be."""
    settings = [
        StackOptions(served=replace(served, isolates=isolates)).settings(splice=True, key="own")
        for isolates in (True, False)
    ]
    assert [each.cache_scope for each in settings] == ["tenant", "shared"]
    (first,), (second,) = (each.tenants for each in settings)
    assert first != second
    assert KEY not in repr(served) and SECRET not in repr(served)
