"""Memory, CPU time and open files of the proxy's processes, each under a name of its own.

Processes that share their metrics leave their names in the folder that they share, so that any of
them exposes all. A process that was started again takes its predecessor's name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path

from prometheus_client import Metric, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from .catalogue.processes import MEMORY_LIMIT, PROCESS_METRICS

ALONE = "proxy"
"""Name of a process that shares its metrics with no other."""

_SUFFIX = ".process"
_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}


class Processes(Collector):
    """Exposes :data:`.catalogue.processes.PROCESS_METRICS`.

    Args:
        found: returns the ids of the processes by their names.
    """

    def __init__(self, found: Callable[[], Mapping[str, int]]) -> None:
        self._found = found

    def collect(self) -> Iterator[Metric]:
        """Yield each metric with a sample for each process."""
        families = {
            spec.name: _FAMILIES[spec.kind](spec.name, spec.help, labels=spec.labels)
            for spec in PROCESS_METRICS
        }
        for name, pid in self._found().items():
            for metric in _metrics_of(pid):
                if metric.name in families:
                    for sample in metric.samples:
                        families[metric.name].add_metric([name], sample.value)
        if (limit := memory_limit()) is not None:
            families[MEMORY_LIMIT].add_metric([], limit)
        yield from (family for family in families.values() if family.samples)


def only_this_process() -> Mapping[str, int]:
    """Return this process under the name of one that shares its metrics with no other."""
    return {ALONE: os.getpid()}


def enter(folder: Path, name: str) -> None:
    """Leave this process's name in a folder; if a running process has it, with a number.

    Args:
        folder: shared by all processes.
        name: the first choice; the number of all names is that of the processes that run at once.
    """
    entry = f"{os.getpid()} {_began(os.getpid())}"
    for number in count(1):
        path = folder / f"{name if number == 1 else f'{name} {number}'}{_SUFFIX}"
        with suppress(FileExistsError), path.open("x", encoding="ascii") as file:
            file.write(entry)
            return
        if _running(path) in (None, os.getpid()):
            path.write_text(entry, encoding="ascii")
            return


def entered(folder: Path) -> dict[str, int]:
    """Return the ids of the running processes that left their names in a folder, by these."""
    found = {path.stem: _running(path) for path in sorted(folder.glob(f"*{_SUFFIX}"))}
    return {name: pid for name, pid in found.items() if pid is not None}


def memory_limit(root: Path = _CGROUPS, proc: Path = _PROC) -> int | None:
    """Return the bytes for this process: the smallest limit of its cgroups and the machine's
    memory; None if neither is known.

    Args:
        root: the tree of cgroups, of either version.
        proc: the folder that holds facts about processes.
    """
    found = []
    for folder, file in _cgroups(root, proc):
        with suppress(OSError):
            text = (folder / file).read_text(encoding="ascii").strip()
            if text.isdigit():
                found.append(int(text))
    with suppress(ValueError, OSError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(found) if found else None


def _cgroups(root: Path, proc: Path) -> Iterator[tuple[Path, str]]:
    """Yield the folders of this process's cgroup and of all above it, with the limit's file.

    A container without a namespace of its own for cgroups sees its limit at the root alone.
    """
    lines = []
    with suppress(OSError):
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    for line in [*lines, "0::/", "0:memory:/"]:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        file = "memory.limit_in_bytes" if controllers else "memory.max"
        top = root / "memory" if controllers else root
        inner = top / path.lstrip("/")
        yield from ((each, file) for each in (inner, *inner.parents) if each.is_relative_to(top))


def _metrics_of(pid: int) -> list[Metric]:
    # A process may end meanwhile.
    with suppress(OSError, ValueError):
        return list(ProcessCollector(pid=lambda: pid, registry=None).collect())
    return []


def _running(path: Path) -> int | None:
    """Return the id in a file of :func:`enter` if the process runs; another one may have got it."""
    try:
        pid, began = path.read_text(encoding="ascii").split()
    except (OSError, ValueError):  # being written
        return None
    return int(pid) if _began(int(pid)) == began else None


def _began(pid: int) -> str | None:
    """Return when a process began, in ticks since the machine's start; None if it doesn't run."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *others = text.rpartition(")")[2].split()
    return None if state in "ZX" else others[18]
