"""The resources that the chart requests are those that the page on operations gives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from leyline_proxy.doctor.findings import Status
from leyline_proxy.doctor.machine import memory_verdict
from leyline_proxy.settings import Settings

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "operations.md").read_text(encoding="utf-8")
KUBERNETES = (REPOSITORY / "docs" / "kubernetes.md").read_text(encoding="utf-8")
GIB = 1 << 30


@pytest.fixture(scope="module")
def resources() -> dict[str, Any]:
    """The chart's default for a proxy."""
    values = yaml.safe_load(
        (REPOSITORY / "deploy" / "helm" / "leyline" / "values.yaml").read_text()
    )
    found: dict[str, Any] = values["proxy"]["resources"]
    return found


def gib(text: str) -> int:
    """The number of GiB in a value of the chart."""
    return int(text.removesuffix("Gi"))


def test_the_pages_have_the_charts_values(resources: dict[str, Any]) -> None:
    """Operations and Kubernetes give the requests and the limit of values.yaml."""
    requests, limits = resources["requests"], resources["limits"]
    assert limits.keys() == {"memory", "ephemeral-storage"}
    memory, most = gib(requests["memory"]), gib(limits["memory"])
    assert f"| CPU | {requests['cpu']} core | none |" in PAGE
    assert f"| memory | {memory} GiB | {most} GiB |" in PAGE
    row = f"| `proxy.resources` | {requests['cpu']} core; {memory} GiB, at most {most} GiB |"
    assert row in KUBERNETES


def test_the_request_covers_the_bounds_of_the_settings(resources: dict[str, Any]) -> None:
    """The sum on the page is that of the default bounds and a new proxy; the request is above it,
    and the doctor finds the limit enough."""
    settings = Settings(upstream="http://127.0.0.1:1")
    started = re.search(r"the (\d+) MB of a new proxy add up to ([\d.]+) GB", PAGE)
    assert started is not None
    bounds = settings.text_memory_bytes + settings.max_session_bytes
    total = bounds + settings.max_stored_response_bytes + int(started[1]) * 1_000_000
    assert f"{total / 1e9:.1f}" == started[2]
    assert total < gib(resources["requests"]["memory"]) * GIB
    assert memory_verdict(settings, gib(resources["limits"]["memory"]) * GIB).status is Status.OK
