"""The chart's objects agree with each other: files, variables, ports and peers."""

from __future__ import annotations

import copy
from pathlib import PurePosixPath
from typing import Any

import pytest
import yaml
from support.helm_chart import (
    Manifest,
    RefusedError,
    of_kind,
    pods,
    ports_of,
    render,
    settings_of,
)
from support.helm_values import EVERYTHING, ON, SETS

from leyline_proxy.settings.authorities import Authority, allowed_hosts, parse_authority

FILES = {
    "policies_file": ("agents-leyline-policies", "policies.yaml"),
    "api_keys_file": ("keys", "api-keys"),
    "redis_ca_file": ("redis", "ca.crt"),
    "tls_cert": ("https", "tls.crt"),
    "tls_key": ("https", "tls.key"),
    "tls_client_ca": ("https", "agents.crt"),
    "upstream_tls_ca": ("engines", "authority.crt"),
    "upstream_tls_cert": ("engines", "tls.crt"),
    "upstream_tls_key": ("engines", "tls.key"),
}


@pytest.fixture(scope="module")
def everything() -> list[Manifest]:
    """The manifests with all that can be switched on."""
    return render(EVERYTHING)


def _container(manifests: list[Manifest], component: str) -> dict[str, Any]:
    (container,) = dict(pods(manifests))[component]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


def _mounted(manifests: list[Manifest]) -> dict[str, tuple[str, str]]:
    """By path in the proxy: the Secret or ConfigMap and its key."""
    volumes = {item["name"]: item for item in dict(pods(manifests))["proxy"]["spec"]["volumes"]}
    found = {}
    for mount in _container(manifests, "proxy")["volumeMounts"]:
        assert "subPath" not in mount, "such a file would never change"
        volume, folder = volumes[mount["name"]], PurePosixPath(mount["mountPath"])
        if "secret" in volume:
            for item in volume["secret"]["items"]:
                found[str(folder / item["path"])] = volume["secret"]["secretName"], item["key"]
        elif "configMap" in volume:
            name = volume["configMap"]["name"]
            for key in of_kind(manifests, "ConfigMap")[name]["data"]:
                found[str(folder / key)] = name, key
    return found


def _rules(manifests: list[Manifest], component: str, way: str) -> list[tuple[Any, Any, str]]:
    """Peer (None for all), port and protocol of each way that a policy opens."""
    policy = of_kind(manifests, "NetworkPolicy")[f"agents-leyline-{component}"]["spec"]
    side = "to" if way == "egress" else "from"
    return [
        (peer, port["port"], port.get("protocol", "TCP"))
        for rule in policy.get(way, ())
        for peer in rule.get(side, [None])
        for port in rule["ports"]
    ]


def test_settings_name_files_that_are_mounted(everything: list[Manifest]) -> None:
    """Each file of the settings, and the settings' own, is of the Secret or ConfigMap meant."""
    settings = yaml.safe_load(settings_of(everything))
    mounted = _mounted(everything)
    assert {name: mounted[settings[name]] for name in FILES} == FILES
    words = _container(everything, "proxy")["args"]
    own = mounted[words[words.index("--config") + 1]]
    assert own == ("agents-leyline-settings", "leyline.yaml")


@pytest.mark.parametrize(
    ("values", "scheme"),
    [
        ({}, "HTTP"),
        ({"tls": {"existingSecret": "https"}}, "HTTPS"),
        ({"settings": {"tls_cert": "/spiffe/svid.pem", "tls_key": "/spiffe/svid.key"}}, "HTTPS"),
    ],
)
def test_probes_and_prometheus_speak_as_the_ports_do(values: dict[str, Any], scheme: str) -> None:
    """HTTPS if the proxy has a certificate, whoever mounts it."""
    manifests = render({"proxy": values, "metrics": {"serviceMonitor": ON}})
    container = _container(manifests, "proxy")
    probes = [container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")]
    assert {probe["scheme"] for probe in probes} == {scheme}
    monitor = of_kind(manifests, "ServiceMonitor")["agents-leyline-proxy"]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint.get("scheme", "http").upper() == scheme
    assert ("tlsConfig" in endpoint) == (scheme == "HTTPS")


def test_a_proxy_without_keys_knows_the_names_it_is_called_by() -> None:
    """Its Services' in the cluster's DNS, the ingress's, and what the values add; pods are called
    by address, and a web page's own name is none of these."""
    own = {"allowed_hosts": ["proxy.example.com"]}
    values: dict[str, Any] = {
        "ingress": {"enabled": True, "host": "ingress.example.com"},
        "proxy": {"settings": own, "admin": {"existingSecret": "admin"}},
    }
    settings = yaml.safe_load(settings_of(render(values)))
    hosts = allowed_hosts("0.0.0.0", settings["allowed_hosts"])  # noqa: S104
    services = ("agents-leyline", "agents-leyline-admin")
    domains = ("", ".models", ".models.svc", ".models.svc.cluster.local")
    called = [f"{service}{domain}:8790" for service in services for domain in domains]
    for host in (*called, "ingress.example.com", "proxy.example.com", "10.1.2.3:8790"):
        found = parse_authority(host)
        assert found is not None and hosts.allows(found), host
    assert not hosts.allows(Authority("evil.test"))
    with_keys = values | {"proxy": {"apiKeys": {"existingSecret": "keys"}}}
    assert "allowed_hosts" not in yaml.safe_load(settings_of(render(with_keys)))


def test_variables_come_from_the_secrets_meant(everything: list[Manifest]) -> None:
    """Each secret reaches its variable by its key, and engines have the proxies' own two."""
    found = {
        component: {
            item["name"]: tuple(item["valueFrom"]["secretKeyRef"].values())
            for item in _container(everything, component)["env"]
            if "secretKeyRef" in item.get("valueFrom", {})
        }
        for component in ("proxy", "engine")
    }
    shared = {"LEYLINE_HINTS_SECRET": ("hints", "hints-secret")}
    assert found["proxy"] == shared | {
        "LEYLINE_SESSION_STORE": ("redis", "url"),
        "LEYLINE_SESSION_SECRET": ("redis", "session-secret"),
        "LEYLINE_UPSTREAM_API_KEY": ("upstream", "api-key"),
        "LEYLINE_ADMIN_KEY": ("admin", "admin-key"),
        "OTEL_EXPORTER_OTLP_HEADERS": ("traces", "headers"),
    }
    assert found["engine"] == shared | {
        "LEYLINE_ENGINE_API_KEY": ("upstream", "api-key"),
        "HF_TOKEN": ("hub", "token"),
    }
    words = _container(everything, "engine")["args"]
    assert words[words.index("--api-key") + 1] == "$(LEYLINE_ENGINE_API_KEY)"


def test_settings_restart_proxies_and_policies_do_not() -> None:
    """Proxies are replaced when what they read once changes, and only then; engines never are."""
    values: dict[str, Any] = {"proxy": {"policies": {"policies": []}}}
    plain = dict(pods(render(values)))
    other = copy.deepcopy(values)
    other["proxy"]["policies"] = {"policies": ["strip_reasoning"]}
    assert dict(pods(render(other))) == plain
    other["proxy"]["settings"] = {"max_concurrent": 7}
    changed = dict(pods(render(other)))
    assert changed["proxy"] != plain["proxy"]
    assert changed["engine"] == plain["engine"]


def test_shared_memory_is_memory(everything: list[Manifest]) -> None:
    """SGLang's shared memory is as large as the values say, and models lie in the volume."""
    (pool,) = of_kind(everything, "StatefulSet").values()
    places = {
        item["mountPath"]: item["name"] for item in _container(everything, "engine")["volumeMounts"]
    }
    volumes = {item["name"]: item for item in pool["spec"]["template"]["spec"]["volumes"]}
    memory = volumes[places["/dev/shm"]]["emptyDir"]  # noqa: S108
    assert memory == {"medium": "Memory", "sizeLimit": "8Gi"}
    (claim,) = pool["spec"]["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == places["/var/cache/leyline"]


def test_names_can_be_looked_up(everything: list[Manifest]) -> None:
    """All pods reach DNS, by both protocols."""
    for component in ("proxy", "engine", "test"):
        ways = _rules(everything, component, "egress")
        for protocol in ("UDP", "TCP"):
            assert any(port == 53 and kind == protocol for _, port, kind in ways), component


def test_redis_is_reached_where_it_is_named(everything: list[Manifest]) -> None:
    """The proxy reaches Redis's port, at the named peers alone, and only where Redis is used."""
    ways = _rules(everything, "proxy", "egress")
    peer = {"podSelector": {"matchLabels": {"app": "redis"}}}
    assert [item for item in ways if item[1] == 6379] == [(peer, 6379, "TCP")]
    assert not [item for item in _rules(render({}), "proxy", "egress") if item[1] == 6379]


def test_a_gateway_routes_the_api_alone() -> None:
    """The route names the Service's own port and the API's path, its streams have no limit, its
    hosts are known to a proxy without keys, and the Gateway's pods may come."""
    peer = {"podSelector": {"matchLabels": {"app": "gateway"}}}
    route = {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["llm.example.com"]}
    manifests = render({"httpRoute": route, "networkPolicy": {"gateway": [peer]}})
    (spec,) = (item["spec"] for item in of_kind(manifests, "HTTPRoute").values())
    assert (spec["parentRefs"], spec["hostnames"]) == ([{"name": "public"}], ["llm.example.com"])
    (rule,) = spec["rules"]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}]
    assert rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}
    (target,) = rule["backendRefs"]
    service = of_kind(manifests, "Service")[target["name"]]
    assert target["port"] in [port["port"] for port in service["spec"]["ports"]]
    assert (peer, "http", "TCP") in _rules(manifests, "proxy", "ingress")
    assert "llm.example.com" in settings_of(manifests)
    assert not of_kind(render({}), "HTTPRoute")
    with pytest.raises(RefusedError, match=r"httpRoute\.parentRefs: name a Gateway"):
        render({"httpRoute": {"enabled": True}})


@pytest.mark.parametrize(
    ("settings", "ports"),
    [
        pytest.param({}, set(), id="none"),
        pytest.param({"oidc_issuer": "https://login.example.com/a"}, {443}, id="by discovery"),
        pytest.param(
            {"oidc_issuer": "https://login.example.com:8443", "oidc_jwks_url": "http://keys/k"},
            {8443, 80},
            id="keys elsewhere",
        ),
    ],
)
def test_the_identity_provider_is_reached_where_it_is_named(
    settings: dict[str, str], ports: set[int]
) -> None:
    """The proxy reaches the ports of its issuer and of the keys, at the named peers alone."""
    peer = {"ipBlock": {"cidr": "203.0.113.0/24"}}
    audience = {"oidc_audience": ["leyline"]} if settings else {}
    values = {
        "proxy": {"settings": settings | audience},
        "networkPolicy": {"identityProvider": [peer]},
    }
    ways = _rules(render(values), "proxy", "egress")
    assert {port for to, port, _ in ways if to == peer} == ports


def test_prometheus_and_ingress_may_come() -> None:
    """Prometheus reaches proxies and engines, or the admin port where metrics are there; an ingress
    controller the API, where there is an ingress."""
    prometheus, controller = (
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}
        for name in ("monitoring", "ingress-nginx")
    )
    plain, ingress, everything = (render(SETS[n]) for n in ("defaults", "ingress", "everything"))
    for manifests, port in ((plain, "http"), (everything, "admin")):
        found = {
            port for peer, port, _ in _rules(manifests, "proxy", "ingress") if peer == prometheus
        }
        assert found == {port}
        assert (prometheus, "http", "TCP") in _rules(manifests, "engine", "ingress")
    assert (controller, "http", "TCP") in _rules(ingress, "proxy", "ingress")
    assert controller not in [peer for peer, _, _ in _rules(plain, "proxy", "ingress")]
    (route,) = of_kind(ingress, "Ingress").values()
    (path,) = route["spec"]["rules"][0]["http"]["paths"]
    service = of_kind(ingress, "Service")[path["backend"]["service"]["name"]]
    assert path["backend"]["service"]["port"]["name"] in [
        port["name"] for port in service["spec"]["ports"]
    ]


def test_monitors_ask_for_metrics(everything: list[Manifest]) -> None:
    """Monitors ask /metrics, with the admin key where that is asked for."""
    monitors = of_kind(everything, "ServiceMonitor")
    (proxy,) = monitors["agents-leyline-proxy"]["spec"]["endpoints"]
    assert proxy["authorization"]["credentials"] == {"name": "admin", "key": "admin-key"}
    (engine,) = monitors["agents-leyline-engine"]["spec"]["endpoints"]
    assert (proxy["path"], engine["path"]) == ("/metrics", "/metrics")
    (open_to_all,) = of_kind(render({"metrics": {"serviceMonitor": ON}}), "ServiceMonitor")[
        "agents-leyline-proxy"
    ]["spec"]["endpoints"]
    assert "authorization" not in open_to_all


def test_service_account_has_no_token(everything: list[Manifest]) -> None:
    """The account gives no pod a token, and each pod has a port of its own for what it serves."""
    (account,) = of_kind(everything, "ServiceAccount").values()
    assert account["automountServiceAccountToken"] is False
    assert ports_of(dict(pods(everything))["proxy"]) == {"http": 8790, "admin": 8791}
