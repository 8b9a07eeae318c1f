"""The committed Grafana boards and alert rules against their generator and the metrics."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from support import boards

QUERIES = list(boards.queries())
ALERTS = boards.alerts()
UNSHOWN: dict[str, str] = {}
"""Metrics that no panel shows, and why."""
FIRST_VARIABLE = "datasource"
BUILT_IN_VARIABLES = {"__rate_interval", "__range"}
ALERT_NAME = re.compile(r"\bLeyline[A-Z]\w+")
DOCS_URL = "https://leyline.example.com/docs"
"""Absolute, for Alertmanager; operators write their own in its place."""
OPERATIONS = boards.REPOSITORY / "docs" / "operations.md"
DOCUMENTED = boards.REPOSITORY / "docs" / "boards.md"
SET_OPERATOR = re.compile(r"\b(?:or|and|unless)\b")
ARITHMETIC = re.compile(r"[-+*/%^]")
TEMPLATE_LABEL = re.compile(r"\$labels\.(\w+)")


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The generator script, as a module."""
    monkeypatch.syspath_prepend(str(boards.REPOSITORY / "grafana"))
    return importlib.import_module("build_dashboards")


@pytest.fixture(scope="module")
def series_labels() -> dict[str, frozenset[str]]:
    """Labels by exposed series name, for every metric there is."""
    return boards.series_labels()


def _metrics(*texts: str) -> set[str]:
    return {name for text in texts for name in boards.METRIC.findall(text)}


def _check_labels(expr: str, series_labels: dict[str, frozenset[str]]) -> None:
    known: set[str] = set()
    for name, selector in boards.SELECTOR.findall(expr):
        assert set(boards.LABEL.findall(selector)) <= series_labels[name], name
        known |= series_labels[name]
    for group in boards.GROUPING.findall(expr):
        assert {label.strip() for label in group.split(",")} - {""} <= known, group


def test_boards_are_up_to_date(builder: ModuleType) -> None:
    """Generating the boards again gives the committed files, byte for byte (`make boards`)."""
    assert {path.name for path in boards.BOARDS} == set(builder.BOARDS)
    for path in boards.BOARDS:
        assert path.read_text(encoding="utf-8") == builder.render(path.name), path.name


@pytest.mark.parametrize("path", boards.BOARDS, ids=lambda path: path.stem)
def test_boards_have_grafanas_types(path: Path) -> None:
    """Read and written by the types that Grafana generates from its schema, a board is the same."""
    register_default_plugins()  # else panels' options and queries are taken as they are
    board = boards.load(path)
    encoder = JSONEncoder(sort_keys=True, indent=2)
    assert encoder.encode(Dashboard.from_json(board)) + "\n" == path.read_text(encoding="utf-8")


def test_every_queried_metric_exists(series_labels: dict[str, frozenset[str]]) -> None:
    """No query, variable, mark or alert names a series that nothing exposes."""
    queried = _metrics(
        *(query.expr for query in QUERIES),
        *boards.variable_queries(),
        *boards.annotation_queries(),
        *(alert.expr for alert in ALERTS),
    )
    assert len(queried) > len(boards.specs()) / 2, "the boards query next to nothing"
    assert queried <= set(series_labels)


def _levels(expr: str) -> list[str]:
    """The expression's text by pairs of parentheses, each without what inner pairs hold."""
    text = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^]]*\]|#.*', "", expr)
    text = re.sub(r"\b(?:by|without|on|ignoring|group_left|group_right) *\([^)]*\)", "", text)
    open_levels, closed = [""], []
    for character in text:
        if character == "(":
            open_levels.append("")
        elif character == ")":
            closed.append(open_levels.pop())
        else:
            open_levels[-1] += character
    return [*open_levels, *closed]


@pytest.mark.parametrize(
    "expr", [*(query.expr for query in QUERIES), *(alert.expr for alert in ALERTS)]
)
def test_arithmetic_beside_set_operators_has_parentheses(expr: str) -> None:
    """No sum swallows a default: `a or b + c` is `a or (b + c)`, so one of them is written."""
    for level in _levels(expr):
        assert not (SET_OPERATOR.search(level) and ARITHMETIC.search(level)), level


def test_every_metric_is_on_a_panel() -> None:
    """Each metric is shown somewhere, or listed with the reason why not; no entry is needless."""
    queried = _metrics(*(query.expr for query in QUERIES))
    unshown = {
        spec.name
        for spec in boards.specs()
        if not queried & {spec.name + suffix for suffix in boards.SUFFIXES[spec.kind]}
    }
    assert unshown == set(UNSHOWN)


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.name)
def test_queried_labels_exist(
    query: boards.PanelQuery, series_labels: dict[str, frozenset[str]]
) -> None:
    """Each label that a query selects or groups by is a label of a metric it is used on."""
    _check_labels(query.expr, series_labels)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_alerts_select_labels_that_exist(
    alert: boards.Alert, series_labels: dict[str, frozenset[str]]
) -> None:
    """Each label that an alert selects, groups by or names in its texts is one of its metrics'."""
    _check_labels(alert.expr, series_labels)
    known = {
        label for name in _metrics(alert.expr) for label in series_labels[name]
    } | boards.TARGET_LABELS
    grouped = re.match(r"\s*(?:\w+\(\s*[\d.,\s]*)?(?:sum|min|max) by \(([^)]*)\)", alert.expr)
    if grouped:
        known = {label.strip() for label in grouped[1].split(",")}
    for text in alert.annotations.values():
        assert set(TEMPLATE_LABEL.findall(text)) <= known, text


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_alerts_say_what_to_do(alert: boards.Alert) -> None:
    """Each has a severity, a summary, a description, and a section that says what to do."""
    anchor = re.sub(r"(?<!^)(?=[A-Z])", "-", alert.name).lower()
    heading = "### " + anchor.replace("-", " ").capitalize()
    assert heading in OPERATIONS.read_text(encoding="utf-8").splitlines()
    assert alert.severity in {"info", "warning", "critical"}
    assert re.fullmatch(r"\d+[sm]", alert.pending)
    assert set(alert.annotations) == {"summary", "description", "runbook_url"}
    assert alert.annotations["runbook_url"] == f"{DOCS_URL}/operations.html#{anchor}"
    assert alert.annotations["description"].endswith(".")


def test_alerts_named_on_panels_exist() -> None:
    """A panel that promises an alert names one that is shipped, and names are unique."""
    names = [alert.name for alert in ALERTS]
    assert len(set(names)) == len(names)
    promised = {
        name
        for path in boards.BOARDS
        for panel in boards.panels(boards.load(path))
        for name in ALERT_NAME.findall(panel["description"])
    }
    assert promised
    assert promised <= set(names)


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
    """A board names no data source of its own, and has the variables that its queries use."""
    board = boards.load(path)
    names = [variable["name"] for variable in board["templating"]["list"]]
    assert board["uid"] == f"leyline-{path.stem}"
    assert names[0] == FIRST_VARIABLE
    used: set[str] = set()
    for panel in boards.panels(board):
        refs = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all(ref == {"type": "prometheus", "uid": "${datasource}"} for ref in refs)
        used |= {v for t in panel["targets"] for v in boards.VARIABLE.findall(t["expr"])}
    assert used == set(names[1:])


@pytest.mark.parametrize("path", boards.BOARDS, ids=lambda path: path.stem)
def test_boards_link_to_each_other(path: Path) -> None:
    """Each board has the tag that all boards' links go by, and takes time and variables along."""
    board = boards.load(path)
    (link,) = board["links"]
    assert (link["type"], link["keepTime"], link["includeVars"]) == ("dashboards", True, True)
    assert set(link["tags"]) <= set(board["tags"])


def test_provisioning_finds_boards_and_data_source() -> None:
    """Grafana's provisioning names the folder that the boards are mounted at, and one source."""
    folder = boards.REPOSITORY / "grafana" / "provisioning"
    providers = (folder / "dashboards" / "leyline.yaml").read_text(encoding="utf-8")
    sources = (folder / "datasources" / "prometheus.yaml").read_text(encoding="utf-8")
    compose = (boards.REPOSITORY / "deploy" / "compose.yaml").read_text(encoding="utf-8")
    path = re.search(r"path: (\S+)", providers)
    assert path is not None
    assert f"../grafana/dashboards:{path[1]}:ro" in compose
    assert "../grafana/provisioning:/etc/grafana/provisioning:ro" in compose
    assert sources.count("type: prometheus") == 1


def test_documented_alerts_are_those_that_are_shipped() -> None:
    """The table of alerts in the documentation has each alert's severity and time, and no other."""
    rows = re.findall(
        r"^\| \[(Leyline\w+)\]\((operations\.md#[a-z-]+)\) \| (\w+) \| (\d+ \w) \|",
        DOCUMENTED.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert rows == [
        (
            alert.name,
            alert.annotations["runbook_url"].removeprefix(f"{DOCS_URL}/").replace(".html", ".md"),
            alert.severity,
            f"{alert.pending[:-1]} {alert.pending[-1]}",
        )
        for alert in ALERTS
    ]


def test_documented_boards_are_those_that_are_shipped() -> None:
    """The documentation names each board by its title and file, and no other."""
    rows = re.findall(
        r"^\| \*(.+?)\* \| `([a-z-]+\.json)` \|",
        DOCUMENTED.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    titles = {path.name: boards.load(path)["title"] for path in boards.BOARDS}
    assert {file: f"Leyline / {title}" for title, file in rows} == titles
