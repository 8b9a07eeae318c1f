"""Settings of recall."""

from __future__ import annotations

from typing import Any

import pytest

from leyline_proxy.settings import Settings
from leyline_proxy.settings.faults import Sources, faults_of
from leyline_proxy.telemetry.metrics import Metrics
from leyline_proxy.tenants.tenant import build_tenant
from leyline_proxy.wiring.recall import build_part_store, build_recall

KEY = "a key of sixteen or more"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"recall_store": "file:///x"}, "recall_store needs recall_key"),
        ({"recall_store": "redis://h"}, "recall_store needs recall_key"),
        ({"recall_key": "short"}, "recall_key must have at least 16"),
        ({"recall_key": f"{KEY},short"}, "recall_key must have at least 16"),
        ({"recall_store": "redis", "recall_key": KEY}, "which is memory"),
        ({"recall_store": "redis://:p#ss@h:1", "recall_key": KEY}, "isn't a URL"),
        ({"recall_store": "/var/lib", "recall_key": KEY}, "recall_store must be memory, redis"),
        ({"recall_store": "s3://b/f?key=1", "recall_key": KEY}, "recall_store must be memory"),
        ({"recall": "maybe"}, "recall"),
        ({"recall_calls": 0}, "recall_calls"),
        ({"tenants": {"red": {"recall_tokens": 5}}}, "recall_tokens"),
    ],
)
def test_wrong_settings_are_named(given: dict[str, Any], told: str) -> None:
    """A wrong setting of recall is named, without its value."""
    with pytest.raises(ValueError) as caught:
        Settings(**given)
    faults = "\n".join(map(str, faults_of(caught.value, Sources())))
    assert told in faults
    assert "p#ss" not in faults


def test_the_default_is_off_and_a_tenant_may_differ() -> None:
    """Recall is off by default; the proxy's setting and a tenant's own switch it, as words or as
    YAML's booleans."""
    assert not build_tenant("red", Settings()).recall
    assert build_recall(Settings(), Metrics()) is None
    on = Settings(recall=True, tenants={"blue": {"recall": "off"}})
    assert build_tenant("red", on).recall
    assert not build_tenant("blue", on).recall
    one = Settings(recall=False, tenants={"blue": {"recall": "on"}})
    assert build_tenant("blue", one).recall
    assert build_recall(one, Metrics()) is not None


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({}, "memory"),
        ({"recall_store": "redis://h:1/0"}, "redis"),
        ({"recall_store": "redis", "session_store": "redis://h:1", "hints_secret": KEY}, "redis"),
        ({"recall_store": "memory://x/y"}, "files"),
    ],
)
async def test_each_place_is_built(given: dict[str, Any], kind: str) -> None:
    """Each form of recall_store gives its kind of store."""
    store = build_part_store(Settings(recall_key=f"{KEY},{KEY}2", **given))
    assert store.name == kind
    await store.aclose()
