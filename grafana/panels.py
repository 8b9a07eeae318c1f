"""Building blocks of the boards: queries, panels, variables and the metric selectors they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat
from grafana_foundation_sdk.builders import timeseries as timeseries_builders
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
BY_TENANT = 'tenant=~"$tenant"'
BY_MODEL = 'model=~"$model"'
BY_BOTH = f"{BY_TENANT},{BY_MODEL}"

Thresholds = Sequence[tuple[float | None, str]]
"""(lower bound, colour) in rising order; the first bound is None."""


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression; ``instant`` for a single value at the end of the time range."""

    expr: str
    legend: str = ""
    instant: bool = False

    def build(self, ref: str) -> prometheus.Dataquery:
        """The SDK's form, under the panel-wide unique ``ref``."""
        query = (
            prometheus.Dataquery()
            .ref_id(ref)
            .expr(self.expr)
            .legend_format(self.legend or "__auto")
            .datasource(DATASOURCE)
            .format(PromQueryFormat.TIME_SERIES)
        )
        return query.instant() if self.instant else query.range()


def _common(
    panel: timeseries_builders.Panel | stat.Panel | bargauge.Panel,
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    unit: str,
    size: tuple[int, int],
) -> None:
    panel.title(title).description(description).datasource(DATASOURCE).unit(unit)
    panel.span(size[0]).height(size[1])
    for index, query in enumerate(queries):
        panel.with_target(query.build(chr(ord("A") + index)))


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
    """A graph over time; ``stacked`` fills the series on top of each other.

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
    """One large number, coloured by ``thresholds``; ``words`` replaces values by text."""
    panel = stat.Panel()
    _common(panel, title, description, [query], unit=unit, size=(width, 5))
    panel.thresholds(_scale(thresholds)).reduce_options(_last_value()).no_value("no traffic")
    panel.color_mode(common_models.BigValueColorMode.VALUE)
    graph = common_models.BigValueGraphMode
    panel.graph_mode(graph.NONE if query.instant or words else graph.AREA)
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
    """Horizontal bars between 0 and 1, in the order of the queries."""
    panel = bargauge.Panel()
    _common(panel, title, description, queries, unit=unit, size=(width, 8))
    panel.min(0).max(1).thresholds(_scale(thresholds)).reduce_options(_last_value())
    panel.orientation(common_models.VizOrientation.HORIZONTAL)
    panel.display_mode(common_models.BarGaugeDisplayMode.BASIC)
    return panel


def datasource_variable() -> dashboard.DatasourceVariable:
    """``$datasource``: which Prometheus to ask."""
    return dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")


def label_variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """A multi-select variable filled from a label's values; "All" matches everything."""
    everything = models.VariableOption(selected=True, text=["All"], value=["$__all"])
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(everything)
    )
