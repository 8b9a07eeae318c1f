"""Facts of this machine and of the processes on it."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from socket import create_server

CHECKOUT = Path(__file__).resolve().parents[3]
"""The root of the repository, for measurements that write its pages or read its fixtures."""


def describe() -> str:
    """Return the processor, the number of its cores, and Python's version."""
    cores = len(os.sched_getaffinity(0))
    return f"{cores} × {_processor()}, Python {platform.python_version()}"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def family(pid: int) -> list[int]:
    """Return a process and all below it, parents first."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            found += [int(child) for child in task.read_text().split()]
    return found


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process, to the nanosecond, ended threads included."""
    # The kernel's CPUCLOCK_SCHED of another process.
    return time.clock_gettime((~pid << 3) | 2)


def memory_mib(pid: int, which: str = "VmRSS") -> float:
    """Return a figure of a process's memory, by its name in ``/proc``.

    Raises:
        RuntimeError: the process has ended.
    """
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{which}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"process {pid} has ended")


def free_port() -> int:
    """Return a free port of the loopback."""
    with create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
