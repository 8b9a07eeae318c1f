"""Reading what a proxy counts: from its page, or from a metric itself."""

from __future__ import annotations

import httpx
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

REQUESTS = "leyline_requests_total"


async def samples(client: httpx.AsyncClient, name: str | None = None) -> list[Sample]:
    """Samples of the page; those of one name, or all."""
    families = text_string_to_metric_families((await client.get("/metrics")).text)
    found = [sample for family in families for sample in family.samples]
    return [sample for sample in found if name in (None, sample.name)]


async def metric(client: httpx.AsyncClient, name: str, *labels: str) -> float:
    """Sum of the samples whose names begin with ``name`` and whose lines hold all ``labels``."""
    lines = (await client.get("/metrics")).text.splitlines()
    found = [line for line in lines if line.startswith(name) and all(x in line for x in labels)]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def value_of(metric: MetricWrapperBase) -> float:
    """The value of a counter or gauge, summed over all its labels."""
    families: list[Metric] = list(metric.collect())
    found = [sample for family in families for sample in family.samples]
    return sum(sample.value for sample in found if not sample.name.endswith("_created"))
