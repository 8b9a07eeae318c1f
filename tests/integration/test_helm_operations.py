"""The chart while it is changed, drained and observed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.helm_chart import (
    CHART,
    Manifest,
    RefusedError,
    allowed,
    helm,
    in_bytes,
    of_kind,
    pods,
    render,
    settings_of,
)
from support.helm_values import EVERYTHING, OFF, ON, SETS
from support.redis_server import free_port

from leyline_proxy.settings import load_settings


def _variables(manifests: list[Manifest]) -> dict[str, Any]:
    (container,) = dict(pods(manifests))["proxy"]["spec"]["containers"]
    return {item["name"]: item.get("value") for item in container["env"]}


def _open_ports(manifests: list[Manifest]) -> dict[int | str, Any]:
    """The peers that the proxy may reach, by port; None for all."""
    policy = of_kind(manifests, "NetworkPolicy")["agents-leyline-proxy"]["spec"]
    return {port["port"]: rule.get("to") for rule in policy["egress"] for port in rule["ports"]}


def test_new_chart_version_restarts_nothing(tmp_path: Path) -> None:
    """A release of the chart that changes no image leaves the pods, and so the engines' KV."""
    newer = tmp_path / "leyline"
    shutil.copytree(CHART, newer)
    facts = yaml.safe_load((CHART / "Chart.yaml").read_text())
    (newer / "Chart.yaml").write_text(yaml.safe_dump(facts | {"version": "9.9.9"}))
    values = {"images": {"engine": {"repository": "x", "tag": "1"}}}
    before, after = (dict(pods(render(values, chart=chart))) for chart in (CHART, newer))
    assert before.keys() == {"proxy", "engine", "test"}
    assert before["engine"] == after["engine"]
    assert before["proxy"] == after["proxy"]


@pytest.mark.parametrize("name", ["defaults", "several proxies", "everything"])
def test_nodes_can_be_drained(name: str) -> None:
    """A budget lets one pod go at a time, and pods that aren't ready always: while no engine is up
    no proxy is."""
    budgets = of_kind(render(SETS[name]), "PodDisruptionBudget")
    assert len(budgets) == 2
    for budget in budgets.values():
        assert budget["spec"]["maxUnavailable"] == 1
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_rollout_waits_for_a_model() -> None:
    """Proxies, ready only with an engine, aren't called stuck while a model may still load."""
    for seconds in (60, 7200):
        manifests = render({"engine": {"startupSeconds": seconds}})
        proxy = of_kind(manifests, "Deployment")["agents-leyline-proxy"]["spec"]
        (engine,) = dict(pods(manifests))["engine"]["spec"]["containers"]
        probe = engine["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] == seconds
        assert proxy["progressDeadlineSeconds"] > seconds


def test_admin_service_has_proxies_that_are_not_ready() -> None:
    """An operator reaches the admin API also while engines are down."""
    manifests = render(EVERYTHING)
    services = of_kind(manifests, "Service")
    assert services["agents-leyline-admin"]["spec"]["publishNotReadyAddresses"] is True
    assert "publishNotReadyAddresses" not in services["agents-leyline"]["spec"]


def test_traces_go_to_the_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a collector is named, traces are on, go there, say which pod they are from, and are let
    through; without one, nothing of it is there."""
    values = {"proxy": {"tracing": EVERYTHING["proxy"]["tracing"]}}
    manifests = render(values)
    path = tmp_path / "leyline.yaml"
    path.write_text(settings_of(manifests))
    assert load_settings(path).trace == "otlp"
    variables = _variables(manifests)
    assert variables["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://collector.observability:4318"
    assert variables["OTEL_TRACES_SAMPLER_ARG"] == "0.05"
    names = list(variables)
    assert names.index("K8S_POD_NAME") < names.index("OTEL_RESOURCE_ATTRIBUTES")
    peers = [{"podSelector": {"matchLabels": {"app": "collector"}}}]
    assert _open_ports(manifests)[4318] is None
    assert _open_ports(render(values | {"networkPolicy": {"collector": peers}}))[4318] == peers
    plain = render({})
    assert 4318 not in _open_ports(plain)
    assert "trace" not in yaml.safe_load(settings_of(plain))


@pytest.mark.parametrize(
    ("model", "fetched"), [("org/model", True), ("/models/mine", False), ("leyline-recall", False)]
)
def test_embedded_engine_may_fetch_its_model(model: str, fetched: bool) -> None:
    """The way to a hub is open where the embedded engine's model comes from there."""
    values = {"embedded": ON | {"model": model}, "engine": OFF}
    assert (443 in _open_ports(render(values))) is fetched
    closed = render(values | {"networkPolicy": {"modelDownload": False}})
    assert 443 not in _open_ports(closed)
    assert allowed(closed, "test", "proxy")


def test_chart_test_says_that_no_proxy_is_ready() -> None:
    """A Service without ready proxies refuses connections; the test pod says so in a line."""
    (asking,) = dict(pods(render({})))["test"]["spec"]["containers"]
    question = [*asking["command"][1:-1], f"http://127.0.0.1:{free_port()}/readyz"]
    answer = subprocess.run(
        [sys.executable, *question], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 1
    assert answer.stderr.startswith("no proxy is ready")
    assert len(answer.stderr.splitlines()) == 1


def _disk(container: Manifest, kind: str) -> int:
    return in_bytes(container["resources"].get(kind, {}).get("ephemeral-storage", "0"))


@pytest.mark.parametrize("name", ["defaults", "embedded", "no storage", "several proxies"])
def test_pods_take_a_bounded_part_of_their_nodes_disk(name: str) -> None:
    """Each folder on the node's disk has a limit, and together they fit into the container's, which
    asks for some; an engine's models without a volume count as the request."""
    for component, pod in pods(render(SETS[name])):
        (container,) = pod["spec"]["containers"]
        folders = {
            volume["name"]: volume["emptyDir"]
            for volume in pod["spec"].get("volumes", ())
            if "emptyDir" in volume
        }
        assert all("sizeLimit" in folder for folder in folders.values()), component
        on_disk = [
            in_bytes(folder["sizeLimit"])
            for folder in folders.values()
            if folder.get("medium") != "Memory"
        ]
        asked, most = _disk(container, "requests"), _disk(container, "limits")
        assert asked > 0
        if name == "no storage" and component == "engine":
            assert (asked, most) == (in_bytes("100Gi"), 0)
            assert in_bytes(folders["cache"]["sizeLimit"]) == asked
        else:
            assert asked <= most
            assert sum(on_disk) < most, "what is logged needs room, too"


def test_storage_is_what_the_values_say() -> None:
    """Limits of folders come from the values, and so do an engine's other resources."""
    values: dict[str, Any] = {
        "proxy": {"storage": {"tmp": "3Gi"}},
        "engine": {
            "storage": {"tmp": "20Gi"},
            "persistence": {"enabled": False, "size": "40Gi"},
        },
    }
    found = dict(pods(render(values)))
    limits = {
        (component, volume["name"]): volume["emptyDir"]["sizeLimit"]
        for component in ("proxy", "engine")
        for volume in found[component]["spec"]["volumes"]
        if "emptyDir" in volume
    }
    assert limits == {
        ("proxy", "tmp"): "3Gi",
        ("proxy", "cache"): "2Gi",
        ("engine", "tmp"): "20Gi",
        ("engine", "shm"): "8Gi",
        ("engine", "cache"): "40Gi",
    }
    (engine,) = found["engine"]["spec"]["containers"]
    assert engine["resources"] == {
        "requests": {"cpu": "4", "memory": "32Gi", "ephemeral-storage": "40Gi"},
        "limits": {"nvidia.com/gpu": 1, "memory": "64Gi"},
    }


def _notes(values: Mapping[str, Any]) -> str:
    shown = helm("install", "--dry-run=client", "agents", str(CHART), values=values)
    return shown.partition("\nNOTES:\n")[2]


def test_notes_say_what_an_ingress_needs_for_tls() -> None:
    """Without a certificate, prompts pass in clear text, and the notes say how to get one; in front
    of a proxy with HTTPS they name what the controller needs."""
    clear, hidden = _notes({"ingress": ON}), _notes({"ingress": ON | {"tlsSecret": "tls"}})
    assert "clear text" in clear and "ingress.tlsSecret" in clear
    assert "https://" not in clear and "Base URL for OpenAI clients: https://" in hidden
    assert "clear text" not in hidden and "backend-protocol" not in hidden
    behind = _notes(
        {"ingress": ON | {"tlsSecret": "tls"}, "proxy": {"tls": {"existingSecret": "https"}}}
    )
    (setting,) = re.findall(r"--set '(.+?=HTTPS)'", behind)
    rendered = helm("template", "agents", str(CHART), "--set", setting, values={"ingress": ON})
    (ingress,) = of_kind([*yaml.safe_load_all(rendered)], "Ingress").values()
    assert ingress["metadata"]["annotations"] == {
        "nginx.ingress.kubernetes.io/backend-protocol": "HTTPS"
    }
    assert "clear text" not in _notes({})


def test_alerts_link_to_the_documentation_of_the_operator() -> None:
    """Each alert's link is absolute, and below the address in the values if there is one."""
    for address in ("https://leyline.example.com/docs", "https://docs.corp.example/leyline/"):
        rules = {"metrics": {"rules": ON | {"docsUrl": address}}}
        (found,) = of_kind(render(rules), "PrometheusRule").values()
        links = [
            rule["annotations"]["runbook_url"]
            for group in found["spec"]["groups"]
            for rule in group["rules"]
        ]
        start = f"{address.rstrip('/')}/operations.html#leyline-"
        assert links and all(link.startswith(start) for link in links)
        assert ("no site" in _notes(rules)) == ("leyline.example.com" in address)
    with pytest.raises(RefusedError, match="docsUrl"):
        render({"metrics": {"rules": ON | {"docsUrl": "docs"}}})
