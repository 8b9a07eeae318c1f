"""The common parts of all boards: variables, links to each other, marks on the time axis."""

from __future__ import annotations

from collections.abc import Sequence

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as models
from panels import DATASOURCE
from queries import BY_TENANT

VARIABLES = {
    "tenant": ("Tenant", "label_values(leyline_requests_total, tenant)"),
    "model": ("Model", f"label_values(leyline_turns_total{{{BY_TENANT}}}, model)"),
    "upstream": ("Engine", "label_values(leyline_upstream_up, upstream)"),
    "instance": ("Target", "label_values(leyline_engine_pool_capacity_tokens, instance)"),
}
"""Title and query of each variable."""

NEW_PROXIES = (
    "count by (instance, version) (leyline_build_info unless leyline_build_info offset 2m)"
)
FIRING = 'ALERTS{alertname=~"Leyline.*",alertstate="firing"}'


def _datasource_variable() -> dashboard.DatasourceVariable:
    """Return ``$datasource``, the Prometheus server to query."""
    return dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")


def _label_variable(name: str) -> dashboard.QueryVariable:
    """Return a multi-select variable of a label's values; "All" matches everything."""
    label, query = VARIABLES[name]
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


def _links() -> dashboard.DashboardLink:
    """Return links to the other boards, which keep the time range and the variables."""
    return (
        dashboard.DashboardLink("Leyline")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags(["leyline"])
        .as_dropdown(False)
        .include_vars(True)
        .keep_time(True)
    )


def _mark(name: str, expr: str, color: str) -> dashboard.AnnotationQuery:
    return (
        dashboard.AnnotationQuery()
        .name(name)
        .datasource(DATASOURCE)
        .enable(True)
        .icon_color(color)
        .expr(expr)
    )


def frame(uid: str, title: str, description: str, variables: Sequence[str]) -> dashboard.Dashboard:
    """Return an empty board.

    Args:
        variables: names of :data:`VARIABLES` that its queries use.
    """
    board = (
        dashboard.Dashboard(f"Leyline / {title}")
        .uid(f"leyline-{uid}")
        .description(description)
        .tags(["leyline"])
        .time("now-1h", "now")
        .refresh("10s")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(_links())
        .annotation(_mark("Proxies that are new", NEW_PROXIES, "blue"))
        .annotation(_mark("Alerts that fire", FIRING, "red"))
        .with_variable(_datasource_variable())
    )
    for name in variables:
        board.with_variable(_label_variable(name))
    return board
