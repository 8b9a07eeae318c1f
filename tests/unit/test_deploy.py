"""The deployment files, as far as they can be checked without a container engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
PROVISIONING = REPOSITORY / "grafana" / "provisioning"


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """The Compose file, decoded."""
    content: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return content


def _mounts(service: dict[str, Any]) -> dict[str, str]:
    """Container path to source, for every volume of a service."""
    split = [volume.split(":") for volume in service.get("volumes", [])]
    return {parts[1]: parts[0] for parts in split}


def test_mounted_paths_exist(compose: dict[str, Any]) -> None:
    """Every host path that Compose mounts is in the repository; all other volumes are declared."""
    for service in compose["services"].values():
        for source in _mounts(service).values():
            if source.startswith("."):
                assert (DEPLOY / source).exists(), source
            else:
                assert source in compose["volumes"]


def test_images_are_pinned(compose: dict[str, Any]) -> None:
    """No image floats: each has a full version, in Compose and in the Dockerfile."""
    images = [service["image"] for service in compose["services"].values()]
    assert all(re.search(r":v?\d+\.\d+\.\d+$", image) for image in images), images
    stages = re.findall(r"^FROM (\S+)", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert set(stages) == {"python:3.11-slim-bookworm"}


def test_ports_are_on_loopback(compose: dict[str, Any]) -> None:
    """Starting the stack publishes nothing beyond the machine."""
    ports = [port for service in compose["services"].values() for port in service["ports"]]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_services_are_watched(compose: dict[str, Any]) -> None:
    """Each service has a health check and a restart policy, and waits for a healthy predecessor."""
    for name, service in compose["services"].items():
        assert service["healthcheck"]["test"], name
        assert service["restart"] == "unless-stopped", name
        for needed in service.get("depends_on", {}).values():
            assert needed == {"condition": "service_healthy"}


def test_prometheus_scrapes_the_proxy(compose: dict[str, Any]) -> None:
    """The scrape target is the proxy's Compose name and port."""
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["leyline:8790"]}]
    assert compose["services"]["leyline"]["environment"]["LEYLINE_PORT"] == "8790"


def test_grafana_is_provisioned(compose: dict[str, Any]) -> None:
    """Data source, boards and home page point at what Compose starts and mounts."""
    grafana = compose["services"]["grafana"]
    mounts = _mounts(grafana)
    provider = yaml.safe_load((PROVISIONING / "dashboards" / "leyline.yaml").read_text())
    folder = provider["providers"][0]["options"]["path"]
    assert mounts[folder] == "../grafana/dashboards"
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).parent == Path(folder)
    assert (REPOSITORY / "grafana" / "dashboards" / Path(home).name).is_file()
    source = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yaml").read_text())
    scrape = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    interval = source["datasources"][0]["jsonData"]["timeInterval"]
    assert interval == scrape["global"]["scrape_interval"]


def test_image_copies_only_what_exists() -> None:
    """Each path that the Dockerfile copies exists and is let through by its ignore file."""
    allowed = {
        line[1:]
        for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied: set[str] = set()
    for line in (DEPLOY / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            copied.update(line.split()[1:-1])
    assert copied == allowed
    assert all((REPOSITORY / path).exists() for path in copied)


def test_image_runs_unprivileged() -> None:
    """The final stage of the image switches to a user without privileges."""
    final = (DEPLOY / "Dockerfile").read_text().rpartition("\nFROM ")[2]
    assert "\nUSER 10001\n" in final
