"""The Helm chart, rendered by helm, checked against the schemas of Kubernetes and the settings."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import ValidationError
from pydantic import SecretStr
from support.helm_chart import (
    CHART,
    NAMESPACE,
    REPOSITORY,
    Manifest,
    RefusedError,
    Schemas,
    allowed,
    helm,
    of_kind,
    pods,
    ports_of,
    render,
    selects,
    settings_of,
)
from support.helm_values import EVERYTHING, OFF, ON, REDIS, SETS
from support.redis_server import free_port

from leyline_proxy.settings import Settings, load_settings

KUBERNETES = "1.37"
OLDEST = "1.27"
START_S = 120.0


@pytest.fixture(scope="module")
def rendered() -> dict[str, list[Manifest]]:
    """The manifests of each set of values."""
    return {name: render(values) for name, values in SETS.items()}


def _unique(rendered: dict[str, list[Manifest]]) -> list[Manifest]:
    found = {
        json.dumps(item, sort_keys=True): item for items in rendered.values() for item in items
    }
    return list(found.values())


def test_chart_is_clean() -> None:
    """helm's own linter has nothing to say against the chart, warnings included."""
    for values in ({}, EVERYTHING):
        helm("lint", "--strict", "--quiet", str(CHART), values=values)


def test_manifests_fit_kubernetes(rendered: dict[str, list[Manifest]]) -> None:
    """Each manifest of each set of values fits the schemas of the newest Kubernetes, strictly."""
    schemas = Schemas(KUBERNETES)
    for manifest in _unique(rendered):
        schemas.check(manifest)


@pytest.mark.nightly
def test_manifests_fit_older_kubernetes(rendered: dict[str, list[Manifest]]) -> None:
    """They fit each minor version back to the oldest that the chart names."""
    minimum = yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"]
    assert minimum == f">={OLDEST}.0-0"
    for minor in range(int(OLDEST.partition(".")[2]), int(KUBERNETES.partition(".")[2])):
        schemas = Schemas(f"1.{minor}")
        for manifest in _unique(rendered):
            schemas.check(manifest)


@pytest.mark.parametrize(
    ("kind", "field"),
    [("Deployment", "replicsa"), ("NetworkPolicy", "ingres"), ("ServiceMonitor", "endpoint")],
)
def test_misspelled_fields_are_found(
    rendered: dict[str, list[Manifest]], kind: str, field: str
) -> None:
    """A field that a cluster would drop in silence fails the check."""
    manifest = copy.deepcopy(next(iter(of_kind(rendered["everything"], kind).values())))
    schemas = Schemas(KUBERNETES)
    schemas.check(manifest)
    manifest["spec"][field] = 1
    with pytest.raises(ValidationError, match=field):
        schemas.check(manifest)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"proxy": {"replicas": 2}}, "several proxies share their sessions in Redis"),
        ({"proxy": {"autoscaling": ON}}, "several proxies share their sessions in Redis"),
        ({"engine": OFF}, "no engine"),
        ({"engine": {"replicas": 0}}, "no engine"),
        ({"embedded": ON}, "engine.enabled=false"),
        ({"embedded": ON, "engine": OFF, "proxy": {"replicas": 2}, "redis": REDIS}, "one proxy"),
        ({"proxy": {"admin": {"metricsOnly": True}}}, "needs proxy.admin.existingSecret"),
        ({"redis": {"caKey": "ca.crt"}}, "needs redis.existingSecret"),
        ({"proxy": {"tls": {"clientCaKey": "ca.crt"}}}, "needs proxy.tls.existingSecret"),
        ({"proxy": {"settings": {"tls_clients": "required"}}}, "which show no certificate"),
        ({"upstreams": {"engine-0": {"url": "http://gpu1"}}}, "the chart's own engine"),
        (
            {"redis": REDIS, "proxy": {"autoscaling": ON | {"minReplicas": 9}}},
            "minReplicas is more than maxReplicas",
        ),
        ({"proxy": {"replicsa": 2}}, "additional properties 'replicsa' not allowed"),
        ({"proxy": {"settings": {"polcy": "x"}}}, "additional properties 'polcy' not allowed"),
        ({"proxy": {"settings": {"max_concurrent": 0}}}, "/proxy/settings/max_concurrent"),
        ({"proxy": {"settings": {"tenants": {"red": {"wieght": 2}}}}}, "'wieght' not allowed"),
        ({"proxy": {"env": [{"name": "LEYLINE_POLCY", "value": "x"}]}}, "/proxy/env/0/name"),
        ({"proxy": {"settings": {"policy": "x"}, "policies": {"policies": []}}}, "not both"),
        ({"proxy": {"tracing": {"endpoint": "collector:4318"}}}, "/proxy/tracing/endpoint"),
        ({"proxy": {"settings": {"session_secret": "x"}}}, "session_secret"),
        ({"proxy": {"settings": {"tenants": {"red": {"api_keys": ["x"]}}}}}, "api_keys"),
        ({"upstreams": {"gpu1": {"url": "gpu1:30000"}}}, "does not match pattern"),
        ({"engine": {"model": ""}}, "/engine/model"),
        ({"images": {"engine": {"repository": "x", "digest": "sha256:1"}}}, "digest"),
    ],
)
def test_broken_values_are_refused(values: dict[str, Any], message: str) -> None:
    """Values that can't work, or that no one reads, are refused with what to do about it."""
    with pytest.raises(RefusedError, match=re.escape(message)):
        render(values)


def test_settings_that_the_chart_keeps() -> None:
    """Each setting that holds a secret has a value of its own, so none gets into a ConfigMap."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    proxy = schema["properties"]["proxy"]["properties"]
    kept = set(proxy["settings"]["propertyNames"]["not"]["enum"])
    fields = Settings.model_fields
    secret = {name for name, field in fields.items() if SecretStr.__name__ in str(field.annotation)}
    assert secret
    assert secret <= kept
    assert kept <= set(fields)


def test_proxy_takes_its_settings(
    rendered: dict[str, list[Manifest]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The proxy reads the rendered file and variables, and finds the engines and limits in them."""
    path = tmp_path / "leyline.yaml"
    for name in ("LEYLINE_SESSION_SECRET", "LEYLINE_ADMIN_KEY", "LEYLINE_HINTS_SECRET"):
        monkeypatch.setenv(name, "0123456789abcdef")
    monkeypatch.setenv("LEYLINE_SESSION_STORE", "rediss://redis:6379/0")
    read = {}
    for name, manifests in rendered.items():
        path.write_text(settings_of(manifests))
        read[name] = load_settings(path)
    assert {name: list(settings.engines()) for name, settings in read.items()} == {
        **{name: ["engine-0"] for name in SETS},
        "pool": ["engine-0", "engine-1", "engine-2"],
        "embedded": [],
        "everything": ["engine-0", "engine-1", "engine-2", "other"],
        "nothing": ["gpu1"],
    }
    settings = read["everything"]
    assert (settings.shutdown_delay_s, settings.shutdown_grace_s) == (20, 300)
    assert (settings.policy_timeout_s, settings.tenants["red"].weight) == (2, 2)
    assert (settings.admin_port, settings.metrics_on_admin) == (8791, True)


def test_engines_are_known_by_name(rendered: dict[str, list[Manifest]]) -> None:
    """Each engine's address is that of a pod of the StatefulSet, under its headless Service."""
    manifests = rendered["pool"]
    (name, pool), *rest = of_kind(manifests, "StatefulSet").items()
    assert not rest
    service = of_kind(manifests, "Service")[pool["spec"]["serviceName"]]
    assert service["spec"]["clusterIP"] == "None"
    # A model loads for minutes; the proxies then find it by themselves.
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert selects(
        {"matchLabels": service["spec"]["selector"]}, pool["spec"]["template"]["metadata"]["labels"]
    )
    domain = f"{service['metadata']['name']}.{NAMESPACE}.svc.cluster.local"
    config = yaml.safe_load(settings_of(manifests))
    found = [item["url"] for item in config["upstreams"].values()]
    assert found == [f"http://{name}-{index}.{domain}:30000" for index in range(3)]
    assert ports_of(pool["spec"]["template"])["http"] == 30000


def test_pods_are_confined(rendered: dict[str, list[Manifest]]) -> None:
    """No pod is root, writes to its image, or has a capability, a token or Services' variables."""
    seen = set()
    for manifests in rendered.values():
        for component, pod in pods(manifests):
            seen.add(component)
            spec = pod["spec"]
            # For a Service of that name Kubernetes would set LEYLINE_PORT, a setting.
            assert spec["enableServiceLinks"] is False
            assert spec["automountServiceAccountToken"] is False
            assert spec["securityContext"]["runAsNonRoot"] is True
            assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            for container in spec["containers"]:
                security = container["securityContext"]
                assert security["readOnlyRootFilesystem"] is True
                assert security["allowPrivilegeEscalation"] is False
                assert security["capabilities"] == {"drop": ["ALL"]}
                assert container["resources"]["limits"]["memory"]
    assert seen == {"proxy", "engine", "test"}


def test_secrets_stay_secrets(rendered: dict[str, list[Manifest]]) -> None:
    """No set renders a Secret, and each variable that holds one refers to it."""
    named = re.compile(r"SECRET|TOKEN|KEY|SESSION_STORE|HEADERS")
    found = set()
    for manifests in rendered.values():
        assert not of_kind(manifests, "Secret")
        for _, pod in pods(manifests):
            for variable in pod["spec"]["containers"][0].get("env", ()):
                if named.search(variable["name"]):
                    assert set(variable) == {"name", "valueFrom"}
                    found.add(variable["valueFrom"]["secretKeyRef"]["name"])
    assert found == {"redis", "admin", "hub", "upstream", "hints", "traces"}


def test_stopping_has_its_time(rendered: dict[str, list[Manifest]]) -> None:
    """A proxy is killed only after its delay and its grace, and replaced before it goes."""
    for name in ("defaults", "everything"):
        manifests = rendered[name]
        proxy = of_kind(manifests, "Deployment")["agents-leyline-proxy"]["spec"]
        config = yaml.safe_load(settings_of(manifests))
        needed = config["shutdown_delay_s"] + config["shutdown_grace_s"]
        assert proxy["template"]["spec"]["terminationGracePeriodSeconds"] >= needed + 10
        assert proxy["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
        ready = proxy["template"]["spec"]["containers"][0]["readinessProbe"]
        # Balancers have turned away before the port closes.
        assert ready["periodSeconds"] * ready["failureThreshold"] <= config["shutdown_delay_s"]


def test_selectors_and_ports_exist(rendered: dict[str, list[Manifest]]) -> None:
    """Services, budgets, monitors and policies select pods that exist, at ports that they have."""
    for manifests in rendered.values():
        templates = [pod for _, pod in pods(manifests)]
        for service in of_kind(manifests, "Service").values():
            (pod,) = (
                pod
                for pod in templates
                if selects({"matchLabels": service["spec"]["selector"]}, pod["metadata"]["labels"])
            )
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= set(ports_of(pod))
        for monitor in of_kind(manifests, "ServiceMonitor").values():
            (service,) = (
                item
                for item in of_kind(manifests, "Service").values()
                if selects(monitor["spec"]["selector"], item["metadata"]["labels"])
            )
            (endpoint,) = monitor["spec"]["endpoints"]
            assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
        for kind, key in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
            for item in of_kind(manifests, kind).values():
                assert any(
                    selects(item["spec"][key], pod["metadata"]["labels"]) for pod in templates
                )


def test_policies_let_through_what_must_pass(rendered: dict[str, list[Manifest]]) -> None:
    """The proxy reaches the engines, and the test pod the proxy; nothing goes the other way."""
    manifests = rendered["pool"]
    assert allowed(manifests, "proxy", "engine")
    assert allowed(manifests, "test", "proxy")
    assert not allowed(manifests, "engine", "proxy")
    assert not allowed(manifests, "test", "engine")
    everything = [item for item in manifests if item["kind"] != "NetworkPolicy"]
    assert allowed(everything, "engine", "proxy")
    proxy = of_kind(manifests, "NetworkPolicy")["agents-leyline-proxy"]["spec"]
    assert all(rule.get("to") for rule in proxy["egress"]), "a rule without peers opens everything"


@pytest.mark.parametrize(
    ("url", "port"),
    [("http://gpu1:30000", 30000), ("http://gpu1/v1", 80), ("https://gpu1", 443)],
)
def test_proxy_reaches_engines_outside(url: str, port: int) -> None:
    """Engines outside the chart are reached at their ports, and nowhere but at the named peers."""
    peers = [{"ipBlock": {"cidr": "10.0.0.0/8"}}]
    manifests = render(
        {
            "engine": OFF,
            "upstreams": {"gpu1": {"url": url}},
            "networkPolicy": {"upstreams": peers},
        }
    )
    proxy = of_kind(manifests, "NetworkPolicy")["agents-leyline-proxy"]["spec"]
    assert {"ports": [{"port": port}], "to": peers} in proxy["egress"]
    assert "agents-leyline-engine" not in of_kind(manifests, "NetworkPolicy")


def test_boards_and_rules_are_the_repository_s(rendered: dict[str, list[Manifest]]) -> None:
    """Each board is in a ConfigMap for Grafana's sidecar, each alert in the rules, unchanged."""
    manifests = rendered["monitoring"]
    maps = [
        item
        for item in of_kind(manifests, "ConfigMap").values()
        if item["metadata"]["labels"].get("grafana_dashboard") == "1"
    ]
    boards = {name: json.loads(text) for item in maps for name, text in item["data"].items()}
    files = sorted((REPOSITORY / "grafana" / "dashboards").glob("*.json"))
    assert boards == {path.name: json.loads(path.read_text()) for path in files}
    (rules,) = of_kind(manifests, "PrometheusRule").values()
    alerts = [
        group
        for path in sorted((REPOSITORY / "deploy" / "alerts").glob("*.yml"))
        for group in yaml.safe_load(path.read_text())["groups"]
    ]
    assert rules["spec"]["groups"] == alerts
    jobs = {
        monitor["spec"]["endpoints"][0]["relabelings"][0]["replacement"]
        for monitor in of_kind(manifests, "ServiceMonitor").values()
    }
    scraped = yaml.safe_load((REPOSITORY / "deploy" / "prometheus.yml").read_text())
    assert jobs == {job["job_name"] for job in scraped["scrape_configs"]}


def test_documented_values_exist() -> None:
    """The table of values names only values that there are, and none of the chart's parts is left
    out of it."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    page = (REPOSITORY / "docs" / "kubernetes.md").read_text()
    rows = re.findall(r"^\| (`.+?`) \|", page, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert {name.partition(".")[0] for name in named} == set(values) - {
        "fullnameOverride",
        "clusterDomain",
    }
    for name in named:
        place = values
        for part in name.split("."):
            assert part in place, name
            place = place[part]


def test_rendered_command_serves(rendered: dict[str, list[Manifest]], tmp_path: Path) -> None:
    """The container's own arguments and file start a proxy that the probes find alive, not ready,
    and the test pod's question names the engine that is missing."""
    manifests = rendered["nothing"]
    config = tmp_path / "leyline.yaml"
    config.write_text(settings_of(manifests))
    (container,) = dict(pods(manifests))["proxy"]["spec"]["containers"]
    port = free_port()
    places = {
        "/etc/leyline/settings/leyline.yaml": str(config),
        "0.0.0.0": "127.0.0.1",  # noqa: S104
        "8790": str(port),
    }
    command = [places.get(word, word) for word in container["args"]]
    program = Path(sys.executable).parent / "leyline"
    environment = {**os.environ, "LEYLINE_SHUTDOWN_DELAY_S": "0"}
    process = subprocess.Popen([program, *command], env=environment, stderr=subprocess.DEVNULL)
    try:
        probes = {
            name: container[name]["httpGet"]["path"] for name in ("livenessProbe", "readinessProbe")
        }
        assert _status(port, probes["livenessProbe"]) == 200
        assert _status(port, probes["readinessProbe"]) == 503
        (asking,) = dict(pods(manifests))["test"]["spec"]["containers"]
        question = [*asking["command"][1:-1], f"http://127.0.0.1:{port}/readyz"]
        answer = subprocess.run(
            [sys.executable, *question], capture_output=True, text=True, check=False
        )
        assert (answer.returncode, answer.stdout[:5]) == (1, "gpu1 ")
    finally:
        process.terminate()
        assert process.wait(20) == 0


def _status(port: int, path: str) -> int:
    until = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except urllib.error.URLError:
            assert time.monotonic() < until
            time.sleep(0.1)
