"""Memory, CPU time and open files of the proxy's processes."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from panels import Query, single_value, time_series
from queries import RATE, of_proxies

MEMORY = "process_resident_memory_bytes"
LIMIT = "leyline_memory_limit_bytes"
LIMIT_COLORS = ((None, "green"), (0.7, "orange"), (0.9, "red"))
_NAME = "{{instance}} {{process}}"


def add_memory(board: dashboard.Dashboard) -> None:
    """Add the memory of the fullest instance, as a single number."""
    used = f"sum by (job, instance) ({MEMORY}) / on (job, instance) {LIMIT}"
    board.with_panel(
        single_value(
            "Memory used",
            "Share of the memory of its container, unit or machine that the fullest proxy holds "
            "with all its processes. Bad: above 0.9, where an alert fires "
            "(LeylineMemoryNearLimit); at 1 it is killed.",
            Query(f"max({used})"),
            unit="percentunit",
            thresholds=LIMIT_COLORS,
        )
    )


def add_processes(board: dashboard.Dashboard) -> None:
    """Add each process's memory, CPU time, files and age."""
    board.with_row(dashboard.Row("Processes"))
    board.with_panel(
        time_series(
            "Memory by process",
            "Resident memory, and the limit for all processes of an instance. Bad: a line that "
            "grows for hours (LeylineMemoryNearLimit); lower the bounds of the proxy's memory.",
            [
                Query(f"sum by (instance, process) ({of_proxies(MEMORY)})", _NAME),
                Query(f"max by (instance) ({LIMIT})", "limit {{instance}}"),
            ],
            unit="bytes",
        )
    )
    cpu = of_proxies(f"rate(process_cpu_seconds_total[{RATE}])")
    board.with_panel(
        time_series(
            "CPU by process",
            "Cores that each process uses. Bad: a worker near 1; its requests wait for each other. "
            "Add workers or replicas.",
            [Query(f"sum by (instance, process) ({cpu})", _NAME)],
            unit="short",
        )
    )
    board.with_panel(
        time_series(
            "Files and connections by process",
            "Share of the descriptors that a process may have open. Bad: above 0.8, where an alert "
            "fires (LeylineFilesNearLimit); at 1 connections are refused.",
            [
                Query(
                    "max by (instance, process) "
                    f"({of_proxies('process_open_fds / process_max_fds')})",
                    _NAME,
                )
            ],
            unit="percentunit",
            ceiling=1,
        )
    )
    age = of_proxies("time() - process_start_time_seconds")
    board.with_panel(
        time_series(
            "Age of processes",
            "Time since each process began. Bad: a fall to 0 without an upgrade; the process died, "
            "and the log says how (process_died).",
            [Query(f"min by (instance, process) ({age})", _NAME)],
            unit="s",
        )
    )
