"""Renders the chart with the real helm, and reads from manifests what a cluster would do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from referencing import Registry
from referencing.jsonschema import DRAFT202012

REPOSITORY = Path(__file__).resolve().parents[2]
CHART = REPOSITORY / "deploy" / "helm" / "leyline"
RELEASE, NAMESPACE = "agents", "models"
_CUSTOM = REPOSITORY / "tests" / "fixtures" / "prometheus_operator"

Manifest = dict[str, Any]


class RefusedError(Exception):
    """helm refuses the values; the text is its own."""


def helm(*words: str, values: Mapping[str, Any] | None = None) -> str:
    """Return the output of a helm command.

    Raises:
        RefusedError: it fails.
    """
    beside = Path(sys.executable).parent / "helm"
    program = str(beside) if beside.exists() else shutil.which("helm")
    if program is None:
        pytest.skip("helm is not installed; `make test` fetches it")
    done = subprocess.run(
        [program, *words, *(() if values is None else ("--values", "-"))],
        input=yaml.safe_dump(values),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RefusedError(done.stderr)
    return done.stdout


def render(values: Mapping[str, Any], chart: Path = CHART) -> list[Manifest]:
    """The manifests of the release ``agents`` in the namespace ``models``."""
    words = ("template", RELEASE, str(chart), "--namespace", NAMESPACE)
    # The boards make this long for the loader in Python.
    documents = yaml.load_all(helm(*words, values=values), yaml.CSafeLoader)
    return [item for item in documents if item]


class Schemas:
    """The schemas of one version of Kubernetes, and of the Prometheus operator; those that refuse
    unknown fields. As `kubernetes_validate.validate` uses them, but read only once."""

    def __init__(self, version: str) -> None:
        folder = files("kubernetes_validate") / "kubernetes-json-schema"
        self._folder = folder / f"v{version}.0-local-strict"
        definitions = json.loads((self._folder / "_definitions.json").read_text())
        self._registry = (DRAFT202012.create_resource(definitions) @ Registry()).crawl()

    def check(self, manifest: Manifest) -> None:
        """Check one manifest.

        Raises:
            jsonschema.ValidationError: it is wrong; says where.
        """
        kind = manifest["kind"]
        group, _, version = manifest["apiVersion"].rpartition("/")
        if group == "monitoring.coreos.com":
            schema = json.loads((_CUSTOM / f"{kind}.json").read_text())
        else:
            parts = (kind.lower(), *filter(None, (group.partition(".")[0], version)))
            schema = json.loads((self._folder / f"{'-'.join(parts)}.json").read_text())
        Draft202012Validator(schema, registry=self._registry).validate(manifest)


def in_bytes(quantity: str) -> int:
    """A quantity of Kubernetes's in bytes, of the units that the chart uses."""
    number = quantity.rstrip("KMGi")
    return int(number) << {"": 0, "Ki": 10, "Mi": 20, "Gi": 30}[quantity[len(number) :]]


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    """The manifests of a kind by name."""
    return {item["metadata"]["name"]: item for item in manifests if item["kind"] == kind}


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Component and pod (metadata and spec) of each workload."""
    for item in manifests:
        if item["kind"] not in ("Pod", "Deployment", "StatefulSet"):
            continue
        template = item if item["kind"] == "Pod" else item["spec"]["template"]
        yield template["metadata"]["labels"]["app.kubernetes.io/component"], template


def ports_of(pod: Manifest) -> dict[str, int]:
    """A pod's named ports."""
    return {
        port["name"]: port["containerPort"]
        for container in pod["spec"]["containers"]
        for port in container.get("ports", ())
    }


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return True if ``matchLabels`` fits."""
    return selector.get("matchLabels", {}).items() <= labels.items()


def settings_of(manifests: list[Manifest]) -> str:
    """The proxy's settings file."""
    text: str = of_kind(manifests, "ConfigMap")["agents-leyline-settings"]["data"]["leyline.yaml"]
    return text


def allowed(manifests: list[Manifest], source: str, target: str) -> bool:
    """Return True if the policies let a component's pod reach the first port of another's."""
    found = dict(pods(manifests))
    port = min(ports_of(found[target]).values())
    return _passes(manifests, found[source], found[target], port, "egress") and _passes(
        manifests, found[target], found[source], port, "ingress"
    )


def _passes(manifests: list[Manifest], own: Manifest, other: Manifest, port: int, way: str) -> bool:
    labels, peer = (pod["metadata"]["labels"] for pod in (own, other))
    names = ports_of(own if way == "ingress" else other)
    mine = [
        item["spec"]
        for item in of_kind(manifests, "NetworkPolicy").values()
        if way.capitalize() in item["spec"]["policyTypes"]
        and selects(item["spec"]["podSelector"], labels)
    ]
    if not mine:
        return True
    rules = [rule for spec in mine for rule in spec.get(way) or ()]
    return any(
        port in [names.get(item["port"], item["port"]) for item in rule["ports"]]
        and any(
            "namespaceSelector" not in item and selects(item.get("podSelector", {}), peer)
            for item in rule.get("from" if way == "ingress" else "to", [{}])
            if "ipBlock" not in item
        )
        for rule in rules
    )
