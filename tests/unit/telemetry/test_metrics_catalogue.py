"""The catalogue of metrics, what is made of it, and the page about it."""

from __future__ import annotations

import importlib
import re
from collections import Counter as Tally
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

import prometheus_client
import pytest
from support.boards import REPOSITORY

from leyline_engine.contract.metrics import ENGINE_METRICS, MetricSpec
from leyline_proxy.model.vocabulary import CAUSES, Decision
from leyline_proxy.telemetry.catalogue import ENTRIES, GROUPS, PROCESS_METRICS
from leyline_proxy.telemetry.metrics import Metrics

SPECS = (*(entry.spec for entry in ENTRIES), *PROCESS_METRICS)
KINDS = {
    "counter": prometheus_client.Counter,
    "gauge": prometheus_client.Gauge,
    "histogram": prometheus_client.Histogram,
}
COMMITTED = Path(__file__).with_name("metric_names.txt")


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that writes the page."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "deploy" / "docs"))
    return importlib.import_module("metrics_page")


def signature(spec: MetricSpec) -> str:
    """The parts of a metric that others' boards rely on."""
    return f"{spec.name} {spec.kind} {','.join(sorted(spec.labels))}".rstrip()


def test_a_renamed_metric_is_noticed() -> None:
    """Names, kinds and labels are those of the committed list; a change breaks the boards of
    others, and the changelog says so."""
    found = sorted(map(signature, (*SPECS, *ENGINE_METRICS)))
    assert found == COMMITTED.read_text(encoding="utf-8").splitlines()


def test_the_page_is_up_to_date(generator: ModuleType) -> None:
    """Writing the page again gives the committed one, byte for byte (`make metrics-docs`)."""
    assert generator.PAGE.read_text(encoding="utf-8") == generator.page()


def test_the_page_names_every_metric(generator: ModuleType) -> None:
    """Each one is in a table once, and every metric that the text names exists."""
    page = generator.page()
    rows = Tally(re.findall(r"^\| `((?:leyline|process)_\w+)` \|", page, re.MULTILINE))
    names = [generator.exposed_name(spec) for spec in (*SPECS, *ENGINE_METRICS)]
    assert rows == Tally(dict.fromkeys(names, 1))
    assert set(re.findall(r"`(leyline_\w+)`", page)) <= set(names)


def test_the_page_and_the_help_name_the_causes() -> None:
    """The closed vocabularies of labels are written out where their metrics are explained."""
    page = (REPOSITORY / "docs" / "metrics.md").read_text(encoding="utf-8")
    helps = {spec.name: spec.help for spec in SPECS}
    for cause in CAUSES:
        assert f"| `{cause}` |" in page
        assert cause in helps["leyline_cache_busts"]
    for decision in Decision:
        assert f"{decision.value}:" in helps["leyline_schedule_decisions"]


def test_the_attributes_are_the_catalogue() -> None:
    """Each entry is the typed attribute of its name, of its kind, with its labels and buckets."""
    declared = {
        name: kind for name, kind in get_type_hints(Metrics).items() if kind in KINDS.values()
    }
    assert declared == {entry.attribute: KINDS[entry.spec.kind] for entry in ENTRIES}
    metrics = Metrics()
    for entry in ENTRIES:
        made = getattr(metrics, entry.attribute)
        assert made._labelnames == entry.spec.labels
        if entry.spec.kind == "histogram":
            assert made._kwargs["buckets"] == entry.spec.buckets


def test_all_that_is_exposed_is_in_the_catalogue() -> None:
    """The registry of an application holds these metrics and no others."""
    found = {metric.name for metric in Metrics().registry.collect()}
    assert found == {spec.name for spec in SPECS}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_metrics_are_named_and_explained_alike(spec: MetricSpec) -> None:
    """A prefix, no suffix that the kind adds, a unit where it is a time; sentences for people."""
    assert re.fullmatch(r"(?:leyline|process)_[a-z]+(_[a-z]+)*", spec.name)
    assert not spec.name.endswith(("_total", "_count", "_sum", "_bucket"))
    assert (spec.kind == "histogram") <= (spec.name.endswith("_seconds") and bool(spec.buckets))
    assert list(spec.buckets) == sorted(set(spec.buckets))
    for text in (spec.help, spec.bad):
        assert not text or (text[-1] == "." and "  " not in text)
    assert spec.help


def test_groups_are_disjoint_and_so_are_proxy_and_engine() -> None:
    """A name is defined once, so that the embedded engine's series can be beside the proxy's."""
    names = Tally(spec.name for spec in (*SPECS, *ENGINE_METRICS))
    assert set(names.values()) == {1}
    assert len({group.title for group in GROUPS}) == len(GROUPS)
