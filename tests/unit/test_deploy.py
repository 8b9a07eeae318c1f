"""The deployment files, as far as they can be checked without a container engine."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.image_build import Stage, copied_from_context, ignored_by, stages_of

from leyline_proxy.settings import Settings
from leyline_proxy.settings.authorities import Authority, allowed_hosts, parse_authority

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
PROVISIONING = REPOSITORY / "grafana" / "provisioning"
BIN = Path(sys.executable).parent
IMAGES = ("Dockerfile", "Dockerfile.proxy", "Dockerfile.sglang")
ENGINE = "engine_patch/leyline_engine"
PROFILES = {
    "cpu": {"leyline", "prometheus", "grafana"},
    "gpu": {"proxy", "sglang", "prometheus", "grafana"},
    "redis": {"redis", "prometheus", "grafana"},
}
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """The Compose file, decoded."""
    content: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return content


@pytest.fixture(scope="module", params=IMAGES)
def image(request: pytest.FixtureRequest) -> list[Stage]:
    """The stages of each Dockerfile."""
    return stages_of(DEPLOY / request.param)


def _mounts(service: dict[str, Any]) -> dict[str, str]:
    """Container path to source, for every volume of a service."""
    split = [volume.split(":") for volume in service.get("volumes", [])]
    return {parts[1]: parts[0] for parts in split}


def _active(compose: dict[str, Any], profile: str) -> dict[str, dict[str, Any]]:
    return {
        name: service
        for name, service in compose["services"].items()
        if profile in service.get("profiles", [profile])
    }


def _run(program: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BIN / program, *words], capture_output=True, text=True, check=False)


def _validate(path: Path) -> subprocess.CompletedProcess[str]:
    return _run("check-jsonschema", "--builtin-schema", "vendor.compose-spec", path)


def test_compose_fits_its_specification(tmp_path: Path) -> None:
    """The Compose file fits the Compose specification's schema, and a misspelled key wouldn't."""
    found = _validate(DEPLOY / "compose.yaml")
    assert found.returncode == 0, found.stdout
    broken = tmp_path / "compose.yaml"
    broken.write_text((DEPLOY / "compose.yaml").read_text().replace("cap_drop:", "cap_drops:"))
    assert _validate(broken).returncode == 1


def test_profiles_start_what_belongs_together(compose: dict[str, Any]) -> None:
    """Each profile has its services, the default is one of them, and nothing that a service waits
    for is left out by a profile."""
    assert {name: set(_active(compose, name)) for name in PROFILES} == PROFILES
    defaults = (DEPLOY / ".env").read_text()
    assert re.search(r"^COMPOSE_PROFILES=(\w+)$", defaults, re.MULTILINE)[1] == "cpu"  # type: ignore[index]
    for profile in PROFILES:
        active = _active(compose, profile)
        for service in active.values():
            assert set(service.get("depends_on", {})) <= set(active)


def test_mounted_paths_exist(compose: dict[str, Any]) -> None:
    """Every host path that Compose mounts is in the repository; all other volumes are declared."""
    for service in compose["services"].values():
        for source in _mounts(service).values():
            if source.startswith("."):
                assert (DEPLOY / source).exists(), source
            else:
                assert source in compose["volumes"]


def test_images_are_pinned(compose: dict[str, Any]) -> None:
    """No image floats: each has a full version and a digest, those made here the project's version
    alone."""
    for service in compose["services"].values():
        image, _, digest = service["image"].partition("@")
        assert re.search(r":v?\d+\.\d+\.\d+$", image), image
        assert "build" in service or re.fullmatch(r"sha256:[0-9a-f]{64}", digest), image
        if "build" in service:
            assert service["image"].endswith(f":{PROJECT['version']}")
            assert (REPOSITORY / service["build"]["dockerfile"]).is_file()


def test_ports_are_on_loopback(compose: dict[str, Any]) -> None:
    """Starting the stack publishes nothing beyond the machine, and no port twice in a profile."""
    for profile in PROFILES:
        ports = [port for item in _active(compose, profile).values() for port in item["ports"]]
        assert ports
        assert all(port.startswith("127.0.0.1:") for port in ports)
        assert len(set(ports)) == len(ports)


def test_the_proxy_knows_the_names_it_is_called_by(compose: dict[str, Any]) -> None:
    """Those of its services, which Prometheus scrapes; a web page's name is none of them."""
    scraped = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"][0]
    called = [*scraped["static_configs"][0]["targets"], "leyline:8790", "proxy:8790"]
    for name in ("leyline", "proxy"):
        words = compose["services"][name]["environment"]
        given = words["LEYLINE_ALLOWED_HOSTS"].replace("${LEYLINE_ALLOWED_HOSTS:-}", "")
        settings = Settings(host=words["LEYLINE_HOST"], allowed_hosts=given)
        hosts = allowed_hosts(settings.host, settings.allowed_hosts)
        known = [authority for host in called if (authority := parse_authority(host))]
        assert len(known) == len(called) and all(map(hosts.allows, known))
        assert not hosts.allows(Authority("evil.test"))


def test_services_are_watched_and_confined(compose: dict[str, Any]) -> None:
    """Each service has a health check, comes back by itself, waits for healthy predecessors, and
    can neither write to its image nor gain rights."""
    for name, service in compose["services"].items():
        assert service["healthcheck"]["test"], name
        assert service["restart"] == "unless-stopped", name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        for needed in service.get("depends_on", {}).values():
            assert needed == {"condition": "service_healthy"}


def test_secrets_come_from_outside(compose: dict[str, Any]) -> None:
    """The Compose file holds no secret, and each of the proxy's variables is a setting."""
    known = {f"LEYLINE_{name.upper()}" for name in Settings.model_fields}
    for service in compose["services"].values():
        for name, value in service.get("environment", {}).items():
            if re.search(r"SECRET|TOKEN|KEY|PASSWORD", name):
                assert value.startswith("${"), name
            if name.startswith("LEYLINE_"):
                assert name in known, name


def test_compose_services_find_each_other(compose: dict[str, Any]) -> None:
    """The proxy asks SGLang where it listens, both have the same secret, keys are read from the
    file that is mounted, and models go into a volume where the images keep them."""
    services = compose["services"]
    proxy, sglang = services["proxy"]["environment"], services["sglang"]
    assert proxy["LEYLINE_UPSTREAM"] == f"http://sglang:{sglang['ports'][0].rpartition(':')[2]}"
    assert proxy["LEYLINE_HINTS_SECRET"] == sglang["environment"]["LEYLINE_HINTS_SECRET"]
    for name in ("leyline", "proxy"):
        (secret,) = services[name]["secrets"]
        keys = services[name]["environment"]["LEYLINE_API_KEYS_FILE"]
        assert keys == f"${{API_KEYS_FILE:+/run/secrets/{secret}}}"
        assert secret in compose["secrets"]
    for name in ("leyline", "sglang"):
        final = stages_of(REPOSITORY / services[name]["build"]["dockerfile"])[-1]
        assert [item.value for item in final.of("VOLUME")] == list(_mounts(services[name]))


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_prometheus_scrapes_what_runs(compose: dict[str, Any], profile: str) -> None:
    """Prometheus scrapes what a profile starts, at the port where it listens, and nothing that the
    profile leaves out: such a name is looked up, and without an answer there is no target."""
    listening: dict[str, int] = {}
    for name, service in _active(compose, profile).items():
        networks = service.get("networks", {"default": {}})
        for alias in (name, *networks["default"].get("aliases", ())):
            listening[alias] = int(service["ports"][0].rpartition(":")[2])
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    fixed, looked_up = _targets(config)
    assert fixed == {("leyline", listening["leyline"])}
    assert looked_up == {("sglang", 30000)}
    running = {"cpu": set[tuple[str, int]](), "gpu": looked_up}
    assert looked_up & set(listening.items()) == running[profile]


def _targets(config: dict[str, Any]) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
    """Names and ports that are always scraped, and those that are when the name is known."""
    fixed, looked_up = set(), set()
    for job in config["scrape_configs"]:
        for item in job.get("static_configs", ()):
            split = (target.split(":") for target in item["targets"])
            fixed |= {(name, int(port)) for name, port in split}
        for item in job.get("dns_sd_configs", ()):
            looked_up |= {(name, item["port"]) for name in item["names"]}
    return fixed, looked_up


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


def test_rules_are_mounted_where_prometheus_looks(compose: dict[str, Any]) -> None:
    """The files of alerts that Prometheus' configuration names lie there in the container."""
    mounts = _mounts(compose["services"]["prometheus"])
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    folder = Path("/etc/prometheus")
    for pattern in config["rule_files"]:
        place = str((folder / pattern).parent)
        assert list((DEPLOY / mounts[place]).glob(Path(pattern).name)), pattern


@pytest.mark.parametrize("name", IMAGES)
def test_dockerfiles_are_clean(name: str) -> None:
    """hadolint has nothing to say against any of them."""
    found = _run("hadolint", DEPLOY / name)
    assert found.returncode == 0, found.stdout


def test_unclean_dockerfile_is_noticed(tmp_path: Path) -> None:
    """A base image without a version, which hadolint calls by its rule, is an error."""
    path = tmp_path / "Dockerfile"
    path.write_text("FROM python\nUSER 1\n")
    found = _run("hadolint", path)
    assert (found.returncode, "DL3006" in found.stdout) == (1, True)


def test_base_images_are_pinned(image: list[Stage]) -> None:
    """Each stage begins with an image of a full version, Python's with its digest: SGLang's is the
    supported one, with its digest once `make digests` has run."""
    (sglang,) = (item.partition("==")[2] for item in PROJECT["optional-dependencies"]["sglang"])
    python = r"python:3\.11\.14-slim-bookworm@sha256:[0-9a-f]{64}"
    bases = rf"{python}|lmsysorg/sglang:v{re.escape(sglang)}(@sha256:[0-9a-f]{{64}})?"
    assert all(re.fullmatch(bases, stage.base) for stage in image)
    assert len(image) == 2


def test_images_copy_only_what_exists() -> None:
    """Each path that a Dockerfile copies exists, and the ignore file lets through just these; the
    replay engine is copied for the embedded engine alone, and the laboratory for none."""
    kept_away, allowed = ignored_by(REPOSITORY / ".dockerignore")
    assert kept_away[0] == "*"
    copied = {name: set(copied_from_context(stages_of(DEPLOY / name))) for name in IMAGES}
    assert set().union(*copied.values()) == set(allowed)
    assert all((REPOSITORY / path).exists() for path in allowed)
    replay = {path for path in allowed if path.startswith("engine_patch/")} - {ENGINE}
    assert "engine_patch/leyline_replay" in replay
    assert (
        copied["Dockerfile"] - replay == copied["Dockerfile.proxy"] == copied["Dockerfile.sglang"]
    )
    assert not [path for path in allowed if path.startswith("bench")]


def test_images_run_unprivileged_and_watched(image: list[Stage]) -> None:
    """The final stage switches to a user without privileges, and states how its health is
    checked."""
    final = image[-1]
    assert [item.value for item in final.of("USER")] == ["10001"]
    assert final.of("HEALTHCHECK")
    assert final.of("ENTRYPOINT")
    names = [item.name for item in final.instructions]
    assert names.index("USER") > max(i for i, name in enumerate(names) if name == "RUN")


def test_sglang_image_switches_leyline_on() -> None:
    """Its command line has what the plugin needs, and what the boards read."""
    command = stages_of(DEPLOY / "Dockerfile.sglang")[-1].last("ENTRYPOINT")
    assert command[:4] == ["python3", "-P", "-m", "sglang.launch_server"]
    pairs = dict(itertools.pairwise(command))
    assert pairs["--radix-cache-backend"] == "leyline"
    assert pairs["--page-size"] == "1"
    assert {"--enable-metrics", "--enable-cache-report"} <= set(command)


def test_chart_has_the_project_s_version() -> None:
    """The chart installs the images of this version."""
    chart = yaml.safe_load((DEPLOY / "helm" / "leyline" / "Chart.yaml").read_text())
    assert chart["appVersion"] == PROJECT["version"]
