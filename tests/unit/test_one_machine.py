"""The example of one big machine: its unit, its settings and its page agree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from configparser import RawConfigParser
from pathlib import Path

import pytest

from leyline_proxy.doctor.findings import Status
from leyline_proxy.doctor.machine import files_verdict, memory_verdict
from leyline_proxy.sessions.redis.store import CACHED_BYTES
from leyline_proxy.settings import Settings, load_settings

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "deploy" / "systemd"
UNIT = EXAMPLE / "leyline@.service"
PAGE = (REPOSITORY / "docs" / "one-machine.md").read_text(encoding="utf-8")
COLOURS = ("blue", "green")
STARTED_BYTES = 160_000_000
"""Memory of a process at its start; docs/operations.md has it, too."""
GIB = 1 << 30


class Unit(RawConfigParser):
    """A unit file: its keys keep their case."""

    def optionxform(self, optionstr: str) -> str:
        """Keep the case."""
        return optionstr


@pytest.fixture(scope="module")
def service() -> dict[str, str]:
    """The section of the service, without keys that are given twice but for the last."""
    unit = Unit(strict=False, interpolation=None)
    unit.read(UNIT)
    return dict(unit["Service"])


def variables(path: Path, value: str = "") -> dict[str, str]:
    """The variables of a file; those that are empty get a value."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {name: given or value for name, _, given in (line.partition("=") for line in lines)}


@pytest.fixture(params=COLOURS)
def settings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The settings of one of the two proxies, with secrets."""
    secrets = variables(EXAMPLE / "secrets.env.example", "a long secret of the tests")
    own = variables(EXAMPLE / f"{request.param}.env")
    for name, value in {**secrets, **own}.items():
        monkeypatch.setenv(name, value)
    return load_settings(EXAMPLE / "leyline.yaml")


def size(text: str) -> int:
    """The bytes of a size in a unit."""
    return int(text.removesuffix("G")) * GIB


def needed_bytes(settings: Settings) -> int:
    """The memory of all processes when their bounds are full."""
    processes = STARTED_BYTES * (settings.workers + 1)
    return processes + settings.text_memory_bytes + CACHED_BYTES * settings.workers


def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    """It knows every key and value, and would notice one that it doesn't know."""
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("no systemd here")
    text = UNIT.read_text().replace("/opt/leyline/%i/bin/leyline", sys.executable)

    def said(content: str) -> str:
        path = tmp_path / "leyline@blue.service"
        path.write_text(content)
        done = subprocess.run(
            [program, "verify", "--man=no", path], capture_output=True, text=True, check=False
        )
        return "\n".join(line for line in done.stderr.splitlines() if path.name in line)

    assert said(text) == ""
    assert "KillMod" in said(text.replace("KillMode=", "KillMod="))
    assert "memory limit" in said(text.replace("MemoryMax=16G", "MemoryMax=much"))


def test_answers_have_their_time_before_systemd_kills(
    service: dict[str, str], settings: Settings
) -> None:
    """The pause of the unit is longer than the delay and the grace of the settings."""
    assert service["KillMode"] == "mixed"
    allowed = int(service["TimeoutStopSec"])
    assert allowed >= settings.shutdown_delay_s + settings.shutdown_grace_s + 10


def test_the_unit_allows_what_the_settings_may_need(
    service: dict[str, str], settings: Settings
) -> None:
    """The doctor finds nothing to say about open files and memory under the unit's limits."""
    files = int(service["LimitNOFILE"])
    assert files_verdict(files, files, settings).status is Status.OK
    assert memory_verdict(settings, size(service["MemoryHigh"])).status is Status.OK
    assert needed_bytes(settings) < size(service["MemoryHigh"]) < size(service["MemoryMax"])


def test_the_page_has_the_figures_of_the_files(service: dict[str, str], settings: Settings) -> None:
    """Memory and open files on the page are computed from the example's settings."""
    assert f"| together | | {needed_bytes(settings) / 1e9:.1f} GB |" in PAGE
    for key in ("MemoryHigh", "MemoryMax", "LimitNOFILE"):
        assert f"`{key}={service[key]}`" in PAGE
    connections = settings.max_upstream_connections * len(settings.engines())
    most = settings.max_connections + connections + settings.redis_max_connections + 128
    assert f"with {len(settings.engines())} engines, {most:,}." in PAGE
    assert f"{len(settings.engines())} engines and {settings.workers}\nworkers" in PAGE


def test_the_page_has_the_rates_of_the_benchmark() -> None:
    """Requests per second follow from the measured CPU time and 70 % of each worker's core."""
    rows = re.findall(
        r"^\| (\d+K) \| ([\d.]+) ms \| (\d+) \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE
    )
    assert len(rows) == 2
    results = (REPOSITORY / "docs" / "results" / "proxy.md").read_text(encoding="utf-8")
    measured = re.search(r"^## Several workers$(.*?)^## ", results, re.MULTILINE | re.DOTALL)
    assert measured is not None
    for tokens, milliseconds, *rates in rows:
        found = re.search(
            rf"^\| {tokens} \| 1 .*\n\| \| 2 \| \d+ \| ([\d.]+) \|", measured[1], re.M
        )
        assert found is not None and f"{float(found[1]):.1f}" == milliseconds
        for workers, rate in zip((2, 4, 8), rates, strict=True):
            assert float(rate) == pytest.approx(workers * 700 / float(found[1]), rel=0.01)


def test_blue_and_green_can_run_at_once() -> None:
    """They share neither a port nor a file, and differ in nothing else."""
    blue, green = (variables(EXAMPLE / f"{colour}.env") for colour in COLOURS)
    assert blue.keys() == green.keys()
    assert len({*blue.values(), *green.values()}) == len(blue) + len(green)
    assert [each["LEYLINE_AUDIT_INSTANCE"] for each in (blue, green)] == [*COLOURS]


def test_the_service_writes_where_it_may(service: dict[str, str], settings: Settings) -> None:
    """The audit log is in the folder that systemd makes for it; all else is read-only."""
    assert settings.audit_file is not None
    assert settings.audit_file.parent == Path("/var/lib") / service["StateDirectory"]
    assert service["ProtectSystem"] == "strict"
    assert service["PrivateTmp"] == "yes"  # of the supervisor's folder


def test_the_repository_holds_no_secret() -> None:
    """The file of secrets names settings, and has no value."""
    lines = variables(EXAMPLE / "secrets.env.example")
    known = {f"LEYLINE_{name.upper()}" for name in Settings.model_fields}
    assert lines.keys() <= known and not any(lines.values())
