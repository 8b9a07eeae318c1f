"""Memory, CPU time and open files of the proxy's processes, which the system counts."""

from __future__ import annotations

from leyline_engine.contract.metrics import MetricSpec

MEMORY_LIMIT = "leyline_memory_limit_bytes"

_BY_PROCESS = ("process",)

PROCESS_METRICS: tuple[MetricSpec, ...] = (
    MetricSpec(
        "process_resident_memory_bytes",
        "gauge",
        "Memory that the process holds, without what is swapped out. Code that processes share "
        "counts for each of them.",
        _BY_PROCESS,
        bad="The sum of an instance near leyline_memory_limit_bytes: it is about to be killed.",
    ),
    MetricSpec(
        MEMORY_LIMIT,
        "gauge",
        "Memory for all processes of the instance together: the container's or unit's limit, or "
        "the machine's memory if that is less.",
        bad="Less than the settings' bounds add up to; `leyline doctor` compares them.",
    ),
    MetricSpec(
        "process_cpu_seconds",
        "counter",
        "CPU time of the process, its own and the system's for it.",
        _BY_PROCESS,
        bad="A rate near 1: the process fills a core, and its requests wait.",
    ),
    MetricSpec(
        "process_open_fds",
        "gauge",
        "Files and connections that the process has open.",
        _BY_PROCESS,
        bad="Near process_max_fds: further connections are refused.",
    ),
    MetricSpec(
        "process_max_fds",
        "gauge",
        "Files and connections that the process may have open.",
        _BY_PROCESS,
        bad="Below max_connections and max_upstream_connections: `ulimit -n` is too low.",
    ),
    MetricSpec(
        "process_start_time_seconds",
        "gauge",
        "When the process began, in seconds since 1970.",
        _BY_PROCESS,
        bad="Recent, without an upgrade: the process died and was started again.",
    ),
)
"""Of each process by its name: ``proxy`` if there is one, otherwise ``supervisor``, ``worker 0``
and so on, and ``engine`` for an embedded one."""
