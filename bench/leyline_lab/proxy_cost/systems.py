"""The processes under the load, and their CPU time and memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from ..engines.process import started
from ..harness import machine
from .upstream import COUNTED, MODEL

BENCH_VENV = machine.CHECKOUT / ".venv-bench"
LITELLM = "litellm[proxy]==1.106.*"
START_S = 180.0
_ROOM = {
    "LEYLINE_MAX_CONCURRENT": "4096",
    "LEYLINE_MAX_QUEUED": "4096",
    "LEYLINE_CONNECT_TIMEOUT_S": "60",
}
"""Settings under which no crowd is refused, so that the work is measured."""
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


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
        """Return the CPU seconds of its processes."""
        return sum(map(machine.cpu_s, machine.family(self.pid)))

    def rss_mb(self) -> float:
        """Return the resident memory of its processes."""
        return sum(map(machine.memory_mib, machine.family(self.pid)))

    def get(self, path: str) -> httpx.Response:
        """Return the answer to a request.

        Raises:
            httpx.HTTPError: it is an error, or there is none.
        """
        return httpx.get(self.origin + path, timeout=5).raise_for_status()


@contextmanager
def running(
    name: str, command: Sequence[str], port: int, path: str, log: Path, **environment: str
) -> Iterator[System]:
    """Run a server until the end, once it answers on a path.

    Args:
        port: the port that it listens on.
        environment: variables over this process's.

    Raises:
        RuntimeError: it doesn't start.
    """
    log.unlink(missing_ok=True)
    variables = {**os.environ, **_ONE_THREAD, **environment}
    with started(command, log.parent, variables, log) as process:
        system = System(name, f"http://127.0.0.1:{port}", process.pid)
        deadline = time.monotonic() + START_S
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                system.get(path)
                break
            time.sleep(0.1)
        else:
            raise RuntimeError(f"{name} did not start:\n{log.read_text()[-2000:]}")
        yield system


def python(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this interpreter."""
    return [sys.executable, "-P", "-m", module, *arguments]


@contextmanager
def canned_upstream(document: Path) -> Iterator[System]:
    """Run the upstream of ``upstream.py``, which is the system ``direct``."""
    port = machine.free_port()
    command = python("leyline_lab.proxy_cost.upstream", str(document), str(port))
    log = document.with_name("upstream.log")
    with running("direct", command, port, "/v1/models", log) as system:
        yield system


@contextmanager
def leyline(name: str, upstream: str, logs: Path, **environment: str) -> Iterator[System]:
    """Run the proxy before ``upstream``, with further settings in its environment."""
    port = machine.free_port()
    program = [sys.executable, "-P", "-c", "from leyline_proxy.cli import main; main()", "serve"]
    command = [*program, "--host", "127.0.0.1", "--port", str(port), "--upstream", upstream]
    with running(name, command, port, "/readyz", logs / name, **_ROOM, **environment) as system:
        if not system.get("/readyz").json()["upstreams"][0]["splices"]:
            raise RuntimeError("Leyline doesn't take the upstream for an engine that splices")
        yield system


@contextmanager
def litellm(upstream: str, logs: Path) -> Iterator[System]:
    """Run LiteLLM before ``upstream``."""
    config, port = logs / "litellm.yaml", machine.free_port()
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
    path, log = "/health/liveliness", logs / "litellm"
    with running("litellm", command, port, path, log, **environment) as system:
        yield system


def nginx_found() -> str | None:
    """Return the path of nginx; None if it isn't installed."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@contextmanager
def nginx(program: str, upstream: str, logs: Path) -> Iterator[System]:
    """Run one worker of nginx that passes requests on: the floor of what a proxy costs."""
    config, port = logs / "nginx.conf", machine.free_port()
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
    with running("nginx", command, port, "/v1/models", logs / "nginx") as system:
        yield system


def set_pause(upstream: System, micros: int) -> None:
    """Set the time between the chunks of the upstream's streams, in microseconds."""
    upstream.get(f"/pause/{micros}")


def requests_of(upstream: System) -> int:
    """Return the number of requests that the upstream has had."""
    return int(upstream.get(COUNTED).content)
