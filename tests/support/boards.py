"""Reading the committed Grafana boards: their panels, queries and template variables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
BOARDS = sorted((REPOSITORY / "grafana" / "dashboards").glob("*.json"))

METRIC = re.compile(r"\bleyline_[a-z_]+")
SELECTOR = re.compile(r"\b(leyline_[a-z_]+)(?:\{([^}]*)\})?")
LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
GROUPING = re.compile(r"\bby\s*\(([^)]*)\)")


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
        return f"{self.panel}/{self.ref}"


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


def variable_queries() -> Iterator[str]:
    """The queries that fill the boards' template variables."""
    for path in BOARDS:
        for variable in load(path)["templating"]["list"]:
            if variable["type"] == "query":
                yield variable["query"]
