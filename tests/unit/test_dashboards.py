"""The committed Grafana boards against their generator and the proxy's metrics."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import boards

from leyline_proxy.telemetry.metrics import Metrics

SUFFIXES = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
}
QUERIES = list(boards.queries())


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The generator script, as a module."""
    monkeypatch.syspath_prepend(str(boards.REPOSITORY / "grafana"))
    return importlib.import_module("build_dashboards")


@pytest.fixture(scope="module")
def series_labels() -> dict[str, set[str]]:
    """Labels by exposed series name, for every metric that the proxy defines."""
    metrics = Metrics()
    labels: dict[str, set[str]] = {}
    defined = {id(metric): metric for metric in vars(metrics).values() if hasattr(metric, "_type")}
    for metric in defined.values():
        for suffix in SUFFIXES[metric._type]:
            names = set(metric._labelnames) | ({"le"} if suffix == "_bucket" else set())
            labels[metric._name + suffix] = names
    return labels


def test_boards_are_up_to_date(builder: ModuleType) -> None:
    """Generating the boards again gives the committed files, byte for byte (`make boards`)."""
    assert {path.name for path in boards.BOARDS} == set(builder.BOARDS)
    for path in boards.BOARDS:
        assert path.read_text(encoding="utf-8") == builder.render(path.name), path.name


def test_every_queried_metric_exists(series_labels: dict[str, set[str]]) -> None:
    """No query or variable names a series that the proxy doesn't expose."""
    texts = [query.expr for query in QUERIES] + list(boards.variable_queries())
    queried = {name for text in texts for name in boards.METRIC.findall(text)}
    assert queried, "the boards query nothing"
    assert queried <= set(series_labels)


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.name)
def test_queried_labels_exist(query: boards.PanelQuery, series_labels: dict[str, set[str]]) -> None:
    """Each label that a query selects or groups by is a label of the metric it is used on."""
    known: set[str] = set()
    for name, selector in boards.SELECTOR.findall(query.expr):
        assert set(boards.LABEL.findall(selector)) <= series_labels[name], name
        known |= series_labels[name]
    for group in boards.GROUPING.findall(query.expr):
        assert {label.strip() for label in group.split(",")} <= known, group


@pytest.mark.parametrize("path", boards.BOARDS, ids=lambda path: path.stem)
def test_panels_explain_themselves(path: Path) -> None:
    """Each panel has a title of its own and says what it shows and what a bad value means."""
    panels = boards.panels(boards.load(path))
    assert len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        assert "Bad:" in panel["description"], panel["title"]


@pytest.mark.parametrize("path", boards.BOARDS, ids=lambda path: path.stem)
def test_panels_lie_on_the_grid(path: Path) -> None:
    """Panels keep to the 24 columns, don't overlap and have ids of their own."""
    every: list[dict[str, Any]] = boards.load(path)["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    taken: set[tuple[int, int]] = set()
    for panel in every:
        grid = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert grid["x"] + grid["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("path", boards.BOARDS, ids=lambda path: path.stem)
def test_boards_can_be_moved(path: Path) -> None:
    """A board names no data source of its own: the variables datasource, tenant, model choose."""
    board = boards.load(path)
    assert board["uid"] == f"leyline-{path.stem}"
    assert [v["name"] for v in board["templating"]["list"]] == ["datasource", "tenant", "model"]
    for panel in boards.panels(board):
        refs = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all(ref == {"type": "prometheus", "uid": "${datasource}"} for ref in refs)
