"""Memory, CPU time and open files of the proxy's processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from leyline_proxy.telemetry.catalogue import PROCESS_METRICS
from leyline_proxy.telemetry.exposition import FOLDER_VARIABLE, enter, exposition
from leyline_proxy.telemetry.metrics import Metrics
from leyline_proxy.telemetry.processes import memory_limit

MIB = 1 << 20
OPENED = 32
NAMED = """
import sys
from leyline_proxy.telemetry.exposition import enter
held = b"x" * (int(sys.argv[2]) << 20)
enter(sys.argv[1])
print("entered", flush=True)
sys.stdin.read()
"""
Samples = dict[tuple[str, str], float]


def scrape(registry: CollectorRegistry) -> Samples:
    """The values of the processes' metrics by series and process."""
    text = exposition({}).text(registry).decode()
    names = {spec.name for spec in PROCESS_METRICS}
    return {
        (sample.name, sample.labels.get("process", "")): sample.value
        for family in text_string_to_metric_families(text)
        if family.name in names
        for sample in family.samples
    }


def test_a_process_shows_what_it_takes() -> None:
    """Memory, CPU time, open files and the start are those of this process, by their units."""
    registry = Metrics().registry
    before = scrape(registry)
    assert {process for _, process in before} == {"proxy", ""}
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert before["process_resident_memory_bytes", "proxy"] == pytest.approx(resident, rel=0.2)
    assert before["leyline_memory_limit_bytes", ""] >= resident
    assert time.time() - 36000 < before["process_start_time_seconds", "proxy"] <= time.time() + 2
    began = time.process_time()
    with ExitStack() as stack:
        for _ in range(OPENED):
            stack.enter_context(Path("/dev/null").open())
        while time.process_time() < began + 0.1:
            pass
        after = scrape(registry)
    opened = after["process_open_fds", "proxy"] - before["process_open_fds", "proxy"]
    assert opened == OPENED
    assert after["process_open_fds", "proxy"] < after["process_max_fds", "proxy"]
    used = after["process_cpu_seconds_total", "proxy"]
    assert used - before["process_cpu_seconds_total", "proxy"] >= 0.08
    assert used == pytest.approx(time.process_time(), abs=0.5)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that processes share."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes, which end with the test."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def named(name: str, held_mib: int = 0) -> subprocess.Popen[str]:
    """A process that entered under a name, and holds memory."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-W", "error", "-c", NAMED, name, str(held_mib)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "entered\n"
    return process


def test_several_processes_are_told_apart(
    folder: Path, started: list[subprocess.Popen[str]]
) -> None:
    """Each counts once under its name; a killed one goes, and its successor takes its name."""
    enter("supervisor")
    started += [named("worker 0", 64), named("worker 1", 192)]
    found = scrape(CollectorRegistry())
    memory = "process_resident_memory_bytes"
    assert {process for name, process in found if name == memory} == {
        "supervisor",
        "worker 0",
        "worker 1",
    }
    more = found[memory, "worker 1"] - found[memory, "worker 0"]
    assert more == pytest.approx(128 * MIB, rel=0.2)
    started[0].kill()
    started[0].wait()
    alone = scrape(CollectorRegistry())
    assert {process for name, process in alone if name == memory} == {"supervisor", "worker 1"}
    started.append(named("worker 0"))
    names = [process for name, process in scrape(CollectorRegistry()) if name == memory]
    assert sorted(names) == ["supervisor", "worker 0", "worker 1"]


def test_names_are_as_many_as_processes_that_run(
    folder: Path, started: list[subprocess.Popen[str]]
) -> None:
    """Proxies that share a folder by themselves get numbers, and give them back when they end."""
    for _ in range(3):
        enter("proxy")
        started += [named("proxy"), named("proxy")]
        names = {process for _, process in scrape(CollectorRegistry())} - {""}
        assert names == {"proxy", "proxy 2", "proxy 3"}
        for process in started:
            process.kill()
            process.wait()


def test_a_stranger_with_the_id_of_one_that_died_is_not_shown(folder: Path) -> None:
    """The system gives ids again: a process that began at another time isn't the one meant."""
    (folder / "worker 0.process").write_text(f"{os.getpid()} 1")
    (folder / "worker 1.process").write_text("")
    assert {process for _, process in scrape(CollectorRegistry())} == {""}


def test_the_smallest_limit_counts(tmp_path: Path) -> None:
    """Of the cgroups above a process, of either version, and of a container's root; ``max`` is no
    limit."""
    root, proc = tmp_path / "cgroup", tmp_path / "proc"
    unit = root / "system.slice" / "leyline.service"
    own = root / "memory" / "docker" / "1"
    for path in (unit, own, proc / "self"):
        path.mkdir(parents=True)
    of_process = proc / "self" / "cgroup"

    def limit() -> int:
        found = memory_limit(root, proc)
        assert found is not None
        return found

    machine = limit()
    assert machine > 64 * MIB
    of_process.write_text("0::/system.slice/leyline.service\n")
    (unit / "memory.max").write_text("max\n")
    assert limit() == machine
    (unit.parent / "memory.max").write_text(f"{32 * MIB}\n")
    assert limit() == 32 * MIB
    (unit / "memory.max").write_text(f"{16 * MIB}\n")
    assert limit() == 16 * MIB
    (root / "memory.max").write_text(f"{8 * MIB}\n")
    assert limit() == 8 * MIB
    of_process.write_text("5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n")
    (own / "memory.limit_in_bytes").write_text(f"{4 * MIB}\n")
    assert limit() == 4 * MIB
    of_process.unlink()
    assert limit() == 8 * MIB
    (root / "memory" / "memory.limit_in_bytes").write_text(f"{2 * MIB}\n")
    assert limit() == 2 * MIB
