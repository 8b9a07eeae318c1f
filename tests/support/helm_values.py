"""Sets of values for the chart: each of its switches is on in one and off in another."""

from __future__ import annotations

from typing import Any

REDIS = {"existingSecret": "redis"}
ON = {"enabled": True}
OFF = {"enabled": False}
EVERYTHING: dict[str, Any] = {
    "images": {"registry": "registry.example.com/team", "pullSecrets": [{"name": "registry"}]},
    "proxy": {
        "settings": {
            "policy_timeout_s": 2,
            "undeclared": "tool=amortize",
            "tenants": {"red": {"weight": 2}},
        },
        "policies": {"policies": []},
        "apiKeys": {"existingSecret": "keys"},
        "tls": {"existingSecret": "https", "clientCaKey": "agents.crt"},
        "admin": {"existingSecret": "admin", "metricsOnly": True},
        "shutdown": {"delaySeconds": 20, "graceSeconds": 300},
        "tracing": {
            "endpoint": "http://collector.observability:4318",
            "sampleRatio": 0.05,
            "headers": {"existingSecret": "traces"},
        },
        "autoscaling": ON,
        "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
        "env": [{"name": "TZ", "value": "UTC"}],
        "volumes": [{"name": "audit", "emptyDir": {}}],
        "volumeMounts": [{"name": "audit", "mountPath": "/var/lib/leyline"}],
        "podAnnotations": {"a": "b"},
        "podLabels": {"team": "agents"},
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "a", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "priorityClassName": "high",
    },
    "redis": REDIS | {"caKey": "ca.crt"},
    "upstreamTls": {"existingSecret": "engines", "caKey": "authority.crt"},
    "engine": {
        "replicas": 3,
        "servedModelName": "model",
        "extraArgs": ["--tp-size", "2"],
        "hubToken": {"existingSecret": "hub"},
        "runtimeClassName": "nvidia",
        "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
        "persistence": {"storageClass": "fast"},
    },
    "upstreams": {"other": {"url": "https://gpu9.example.com", "weight": 2}},
    "upstreamApiKey": {"existingSecret": "upstream"},
    "hintsSecret": {"existingSecret": "hints"},
    "ingress": {"enabled": True, "className": "nginx", "tlsSecret": "tls"},
    "networkPolicy": {
        "admins": [{"podSelector": {"matchLabels": {"role": "admin"}}}],
        "redis": [{"podSelector": {"matchLabels": {"app": "redis"}}}],
        "upstreams": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
        "collector": [{"podSelector": {"matchLabels": {"app": "collector"}}}],
        "extraProxyEgress": [{"ports": [{"port": 6380}]}],
    },
    "metrics": {
        "serviceMonitor": ON | {"labels": {"release": "prometheus"}},
        "rules": ON,
        "dashboards": ON,
    },
}
NOTHING: dict[str, Any] = {
    "proxy": {"disruptionBudget": OFF, "topologySpread": OFF},
    "engine": OFF,
    "upstreams": {"gpu1": {"url": "http://gpu1:30000"}},
    "networkPolicy": OFF,
    "serviceAccount": {"create": False},
}
SETS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "pool": {"engine": {"replicas": 3}},
    "several proxies": {"proxy": {"replicas": 3}, "redis": REDIS},
    "ingress": {"ingress": ON},
    "embedded": {"embedded": ON, "engine": OFF},
    "monitoring": {"metrics": {"serviceMonitor": ON, "rules": ON, "dashboards": ON}},
    "no storage": {"engine": {"persistence": OFF, "disruptionBudget": OFF}},
    "everything": EVERYTHING,
    "nothing": NOTHING,
}
