"""The processes under the load, and their CPU time and memory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from urllib.parse import urlsplit

from .upstream import ASKED, COUNTED, MODEL

ROOT = Path(__file__).resolve().parents[2]
BENCH_VENV = ROOT / ".venv-bench"
LITELLM = "litellm[proxy]==1.106.*"
START_S = 180.0
ROOM = {
    "LEYLINE_MAX_CONCURRENT": "4096",
    "LEYLINE_MAX_QUEUED": "4096",
    "LEYLINE_CONNECT_TIMEOUT_S": "60",
}
"""Settings under which no crowd is refused, so that the work is measured."""

_RESIDENT = re.compile(r"VmRSS:\s+(\d+) kB")


def set_up() -> None:
    """Make the environment of the proxy with which Leyline is compared."""
    subprocess.run([sys.executable, "-P", "-m", "venv", str(BENCH_VENV)], check=True)
    command = [str(BENCH_VENV / "bin" / "pip"), "install", "-q", LITELLM]
    subprocess.run(command, check=True)


@dataclass(frozen=True)
class System:
    """A server under the load."""

    name: str
    origin: str
    pid: int

    def cpu_s(self) -> float:
        """Return the CPU seconds of its processes, to the nanosecond, ended threads included."""
        return sum(time.clock_gettime(_clock_of(pid)) for pid in _family(self.pid))

    def rss_mb(self) -> float:
        """Return the resident memory of its processes."""
        found = 0
        for pid in _family(self.pid):
            resident = _RESIDENT.search(Path(f"/proc/{pid}/status").read_text())
            found += int(resident[1]) if resident is not None else 0
        return found / 1024


def _clock_of(pid: int) -> int:
    """Return the clock of another process's CPU time: the kernel's CPUCLOCK_SCHED."""
    return (~pid << 3) | 2


def _family(pid: int) -> list[int]:
    """Return a process and all below it."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            found += [int(child) for child in task.read_text().split()]
    return found


@contextmanager
def running(
    document: Path,
    *,
    litellm: bool,
    asked: bool,
    loops: Sequence[str] = (),
    nginx: str | None = None,
) -> Iterator[list[System]]:
    """Run the upstream, which is also ``direct``, and the proxies before it.

    Args:
        asked: True to run Leyline also before an engine whose answers don't bring their records.
        loops: further event loops on which Leyline runs, by the setting's words.
        nginx: the program; None to run no proxy that only copies bytes.
    """
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        upstream = stack.enter_context(canned_upstream(document))
        systems = [upstream, stack.enter_context(leyline("leyline", upstream.origin, logs))]
        if asked:
            url = upstream.origin + ASKED
            systems.append(stack.enter_context(leyline("leyline asks", url, logs)))
        for loop in loops:
            proxy = leyline(loop, upstream.origin, logs, LEYLINE_LOOP=loop)
            systems.append(stack.enter_context(proxy))
        if litellm:
            systems.append(stack.enter_context(_litellm(upstream.origin, logs)))
        if nginx is not None:
            systems.append(stack.enter_context(_nginx(nginx, upstream.origin, logs)))
        yield systems


@contextmanager
def _process(
    command: list[str], log: Path | None = None, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    out = log.open("w") if log is not None else subprocess.PIPE
    path = os.pathsep.join(filter(None, (str(ROOT / "bench"), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        command,
        cwd=ROOT / "bench",
        env={
            **os.environ,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **environment,
        },
        stdout=out,
        stderr=subprocess.STDOUT if log is not None else None,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def canned_upstream(document: Path) -> Iterator[System]:
    """Run the upstream of ``upstream.py``."""
    with _process([sys.executable, "-P", "-m", "overhead.upstream", str(document)]) as process:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        yield System("direct", f"http://127.0.0.1:{port}", process.pid)


@contextmanager
def leyline(name: str, upstream: str, logs: Path, **environment: str) -> Iterator[System]:
    """Run the proxy before ``upstream``, with further settings in its environment."""
    port, log = _free_port(), logs / name
    program = str(Path(sys.executable).parent / "leyline")
    command = [program, "serve", "--upstream", upstream, "--port", str(port)]
    with _process(command, log, **ROOM, **environment) as process:
        system = System(name, f"http://127.0.0.1:{port}", process.pid)
        _await(system, "/readyz", process, log)
        with urllib.request.urlopen(f"{system.origin}/readyz") as answer:  # noqa: S310 - loopback
            if b'"splices":true' not in answer.read():
                raise RuntimeError("Leyline doesn't take the upstream for an engine that splices")
        yield system


@contextmanager
def _litellm(upstream: str, logs: Path) -> Iterator[System]:
    config, log, port = logs / "litellm.yaml", logs / "litellm", _free_port()
    config.write_text(
        "model_list:\n"
        f"  - model_name: {MODEL}\n"
        "    litellm_params:\n"
        f"      model: openai/{MODEL}\n"
        f"      api_base: {upstream}/v1\n"
        "      api_key: none\n"
    )
    program = str(BENCH_VENV / "bin" / "litellm")
    command = [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    environment = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        # Without keys it has less to do, as has Leyline.
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    }
    with _process(command, log, **environment) as process:
        system = System("litellm", f"http://127.0.0.1:{port}", process.pid)
        _await(system, "/health/liveliness", process, log)
        yield system


def nginx_found() -> str | None:
    """Return the path of nginx; None if it isn't installed."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@contextmanager
def _nginx(program: str, upstream: str, logs: Path) -> Iterator[System]:
    """Run one worker of nginx that passes requests on: the floor of what a proxy costs."""
    config, log, port = logs / "nginx.conf", logs / "nginx", _free_port()
    files = "".join(
        f"{kind}_temp_path {logs}/nginx-{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config.write_text(
        f"daemon off; worker_processes 1; pid {logs}/nginx.pid; error_log stderr;\n"
        "events { worker_connections 8192; }\n"
        f"http {{ access_log off; {files}\n"
        # A body in memory and chunks as they come, as in Leyline.
        "client_max_body_size 64m; client_body_buffer_size 8m; proxy_buffering off;\n"
        f"upstream engine {{ server {urlsplit(upstream).netloc}; keepalive 256; }}\n"
        f"server {{ listen 127.0.0.1:{port}; keepalive_requests 1000000;\n"
        "location / { proxy_pass http://engine; proxy_http_version 1.1;"
        ' proxy_set_header Connection ""; proxy_read_timeout 600s; } } }\n'
    )
    command = [program, "-p", str(logs), "-c", str(config)]
    with _process(command, log) as process:
        system = System("nginx", f"http://127.0.0.1:{port}", process.pid)
        _await(system, "/v1/models", process, log)
        yield system


def _free_port() -> int:
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await(system: System, path: str, process: subprocess.Popen[str], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(system.origin + path, timeout=5):  # noqa: S310 - loopback
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"{system.name} did not start:\n{log.read_text()[-2000:]}")


def set_pause(upstream: System, micros: int) -> None:
    """Set the time between the chunks of the upstream's streams, in microseconds."""
    with urllib.request.urlopen(f"{upstream.origin}/pause/{micros}"):  # noqa: S310 - loopback
        return


def requests_of(upstream: System) -> int:
    """Return the number of requests that the upstream has had."""
    with urllib.request.urlopen(upstream.origin + COUNTED) as answer:  # noqa: S310 - loopback
        return int(answer.read())
