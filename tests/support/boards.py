"""Reading what Grafana and Prometheus are given: boards with their queries, and alert rules."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from leyline_engine.contract.metrics import ENGINE_METRICS, MetricSpec
from leyline_proxy.telemetry.catalogue import ENTRIES, PROCESS_METRICS

REPOSITORY = Path(__file__).resolve().parents[2]
BOARDS = sorted((REPOSITORY / "grafana" / "dashboards").glob("*.json"))
RULES = sorted((REPOSITORY / "deploy" / "alerts").glob("*.yml"))
RULE_TESTS = sorted((REPOSITORY / "tests" / "fixtures" / "alerts").glob("*.yml"))

METRIC = re.compile(r"\b(?:leyline|process)_[a-z_]+")
SELECTOR = re.compile(r"\b((?:leyline|process)_[a-z_]+)(?:\{([^}]*)\})?")
LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
GROUPING = re.compile(r"\b(?:by|on|group_left)\s*\(([^)]*)\)")
VARIABLE = re.compile(r"\$([a-z]+)\b")

TARGET_LABELS = frozenset({"job", "instance"})
"""The labels that Prometheus adds to each series."""
SUFFIXES = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
}


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """One query of one panel; ``name`` is unique on its board."""

    board: str
    panel: str
    ref: str
    expr: str
    instant: bool

    @property
    def name(self) -> str:
        return f"{self.board}: {self.panel}/{self.ref}"


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert rule."""

    name: str
    expr: str
    pending: str
    severity: str
    annotations: dict[str, str]


def load(path: Path) -> dict[str, Any]:
    """The board as decoded JSON."""
    board: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return board


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """The panels that show something, without the row titles."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def queries() -> Iterator[PanelQuery]:
    """Every query of every committed board."""
    for path in BOARDS:
        for panel in panels(load(path)):
            for target in panel["targets"]:
                yield PanelQuery(
                    path.stem,
                    panel["title"],
                    target["refId"],
                    target["expr"],
                    bool(target.get("instant")),
                )


def variable_queries() -> set[str]:
    """The queries that fill the boards' template variables."""
    return {
        variable["query"]
        for path in BOARDS
        for variable in load(path)["templating"]["list"]
        if variable["type"] == "query"
    }


def annotation_queries() -> set[str]:
    """The queries that mark points in time on the boards."""
    return {mark["expr"] for path in BOARDS for mark in load(path)["annotations"]["list"]}


def alerts() -> list[Alert]:
    """Every alert rule that is shipped."""
    return [
        Alert(
            rule["alert"],
            rule["expr"],
            rule["for"],
            rule["labels"]["severity"],
            rule["annotations"],
        )
        for path in RULES
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
    ]


def specs() -> tuple[MetricSpec, ...]:
    """Every metric of the proxy, of its processes and of the engines."""
    return (*(entry.spec for entry in ENTRIES), *PROCESS_METRICS, *ENGINE_METRICS)


def series_labels() -> dict[str, frozenset[str]]:
    """Labels by the name of each series, as Prometheus has it."""
    return {
        spec.name + suffix: TARGET_LABELS.union(
            spec.labels, {"le"} if suffix == "_bucket" else set()
        )
        for spec in specs()
        for suffix in SUFFIXES[spec.kind]
    }
