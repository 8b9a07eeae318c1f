"""Building blocks of the boards: queries and panels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat
from grafana_foundation_sdk.builders import table as table_builders
from grafana_foundation_sdk.builders import timeseries as timeseries_builders
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
Panel: TypeAlias = timeseries_builders.Panel | stat.Panel | bargauge.Panel | table_builders.Panel

Thresholds = Sequence[tuple[float | None, str]]
"""(lower bound, colour) in rising order; the first bound is None."""


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression.

    Attributes:
        instant: True for the value at the end of the time range only.
        exemplars: True to mark single measurements that the metric names, with their traces.
    """

    expr: str
    legend: str = ""
    instant: bool = False
    exemplars: bool = False

    def build(
        self, ref: str, form: PromQueryFormat = PromQueryFormat.TIME_SERIES
    ) -> prometheus.Dataquery:
        """Return the SDK's form, under the panel-wide unique ``ref``."""
        query = (
            prometheus.Dataquery()
            .ref_id(ref)
            .expr(self.expr)
            .legend_format(self.legend or "__auto")
            .datasource(DATASOURCE)
            .format(form)
        )
        if self.exemplars:
            query = query.exemplar(True)
        return query.instant() if self.instant else query.range()


def _common(
    panel: Panel,
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    unit: str,
    size: tuple[int, int],
    form: PromQueryFormat = PromQueryFormat.TIME_SERIES,
) -> None:
    panel.title(title).description(description).datasource(DATASOURCE).unit(unit)
    panel.span(size[0]).height(size[1])
    for index, query in enumerate(queries):
        panel.with_target(query.build(chr(ord("A") + index), form))


def _scale(thresholds: Thresholds) -> dashboard.ThresholdsConfig:
    return (
        dashboard.ThresholdsConfig()
        .mode(models.ThresholdsMode.ABSOLUTE)
        .steps([models.Threshold(value=bound, color=color) for bound, color in thresholds])
    )


def _last_value() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"]).values(False)


def time_series(
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    unit: str,
    stacked: bool = False,
    colors: Mapping[str, str] | None = None,
    ceiling: float | None = None,
    width: int = 12,
) -> timeseries_builders.Panel:
    """Return a graph over time; ``stacked`` fills the series on top of each other.

    ``colors`` fixes the colour of a series by its legend, ``ceiling`` the axis' upper end.
    """
    panel = timeseries_builders.Panel()
    _common(panel, title, description, queries, unit=unit, size=(width, 8))
    panel.min(0).line_width(1 if stacked else 2).fill_opacity(60 if stacked else 8)
    panel.show_points(common_models.VisibilityMode.AUTO)
    panel.legend(
        common.VizLegendOptions()
        .display_mode(common_models.LegendDisplayMode.TABLE)
        .placement(common_models.LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs(["lastNotNull", "mean"])
    )
    panel.tooltip(
        common.VizTooltipOptions()
        .mode(common_models.TooltipDisplayMode.MULTI)
        .sort(common_models.SortOrder.DESCENDING)
    )
    if stacked:
        panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    if ceiling is not None:
        panel.max(ceiling)
    for series, color in (colors or {}).items():
        fixed = {"mode": "fixed", "fixedColor": color}
        panel.override_by_name(series, [models.DynamicConfigValue(id_val="color", value=fixed)])
    return panel


def single_value(
    title: str,
    description: str,
    query: Query,
    *,
    unit: str,
    thresholds: Thresholds,
    words: Mapping[str, str] | None = None,
    width: int = 4,
) -> stat.Panel:
    """Return one large number, coloured by ``thresholds``; ``words`` replaces values by text."""
    panel = stat.Panel()
    _common(panel, title, description, [query], unit=unit, size=(width, 5))
    panel.thresholds(_scale(thresholds)).reduce_options(_last_value()).no_value("no traffic")
    panel.color_mode(common_models.BigValueColorMode.VALUE)
    graph = common_models.BigValueGraphMode
    panel.graph_mode(graph.NONE if query.instant or words else graph.AREA)
    if unit == "short":
        panel.decimals(0)  # increases are extrapolated
    if words:
        texts = {value: models.ValueMappingResult(text=text) for value, text in words.items()}
        panel.mappings([models.ValueMap(options=texts)])
    return panel


def bars(
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    unit: str,
    thresholds: Thresholds,
    width: int = 12,
) -> bargauge.Panel:
    """Return horizontal bars between 0 and 1, in the order of the queries."""
    panel = bargauge.Panel()
    _common(panel, title, description, queries, unit=unit, size=(width, 8))
    panel.min(0).max(1).thresholds(_scale(thresholds)).reduce_options(_last_value())
    panel.orientation(common_models.VizOrientation.HORIZONTAL)
    panel.display_mode(common_models.BarGaugeDisplayMode.BASIC)
    return panel


def table(
    title: str,
    description: str,
    columns: Mapping[str, Query],
    *,
    labels: Mapping[str, str],
    width: int = 24,
) -> table_builders.Panel:
    """Return a row for each set of labels, as it is at the end of the time range.

    Args:
        columns: instant queries by their columns' titles; one titled "" only gives rows.
        labels: titles of the columns of labels, in order; other labels aren't shown.
    """
    panel = table_builders.Panel()
    queries = list(columns.values())
    panel.show_header(True)
    form = PromQueryFormat.TABLE
    _common(panel, title, description, queries, unit="short", size=(width, 8), form=form)
    refs = [chr(ord("A") + index) for index in range(len(queries))]
    # Grafana calls the value of a lone query "Value".
    names = [f"Value #{ref}" for ref in refs] if len(refs) > 1 else ["Value"]
    titles = dict(zip(names, columns, strict=True))
    shown = [*labels, *(name for name in names if titles[name])]
    panel.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    panel.with_transformation(
        models.DataTransformerConfig(
            id_val="filterFieldsByName", options={"include": {"names": shown}}
        )
    )
    panel.with_transformation(
        models.DataTransformerConfig(
            id_val="organize",
            options={
                "indexByName": {name: place for place, name in enumerate(shown)},
                "renameByName": {**labels, **{n: t for n, t in titles.items() if t}},
            },
        )
    )
    return panel
