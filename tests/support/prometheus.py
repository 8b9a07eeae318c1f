"""A real Prometheus server that scrapes what a test runs, with the shipped alert rules."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from support import boards
from support.redis_server import free_port

VENV_BIN = Path(sys.executable).parent
START_TIMEOUT_S = 60.0
QUERY_TIMEOUT_S = 30.0
SCRAPE_S = 1.0
WINDOW = "20s"
_WINDOWS = re.compile(r"\[\d+m\]")
_OFFSETS = re.compile(r"offset \d+m")


def program(name: str) -> str:
    """A program of the Debian package prometheus, from the venv or the system."""
    found = shutil.which(name, path=f"{VENV_BIN}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip(f"{name} is not installed; `make test` fetches it on Debian")
    return found


def promtool(*arguments: str | Path, text: str | None = None) -> None:
    """Run promtool; fails with what it says."""
    result = subprocess.run(
        [program("promtool"), *map(str, arguments)],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def hurried(text: str) -> str:
    """Alert rules that wait for nothing and look back for seconds; a label distinguishes them."""
    rules = yaml.safe_load(_OFFSETS.sub(f"offset {WINDOW}", _WINDOWS.sub(f"[{WINDOW}]", text)))
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule["for"] = "0s"
            rule["labels"]["hurried"] = "yes"
    return yaml.safe_dump(rules)


class Prometheus:
    """A Prometheus server's API."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.url = url
        self._http = httpx.Client(base_url=f"{url}/api/v1", timeout=30)

    def close(self) -> None:
        """Let the connections go."""
        self._http.close()

    def get(self, path: str, **params: str | float | Sequence[str]) -> Any:
        """The data of an answer."""
        response = self._http.get(path, params=params)
        assert response.status_code == 200, response.text
        return response.json()["data"]

    def instant(self, expr: str) -> list[float]:
        """The numbers that ``expr`` gives now."""
        return _numbers(series["value"] for series in self.get("query", query=expr)["result"])

    def series(self, expr: str, seconds: float = 90) -> list[dict[str, Any]]:
        """Labels and values over the last seconds."""
        now = time.time()
        found: list[dict[str, Any]] = self.get(
            "query_range", query=expr, start=now - seconds, end=now, step=1
        )["result"]
        return found

    def drawn(self, expr: str, *, instant: bool) -> list[float]:
        """The numbers that a panel with this query would draw."""
        if instant:
            return self.instant(expr)
        return _numbers(value for one in self.series(expr) for value in one["values"])

    def one(self, expr: str) -> float:
        """The only number that ``expr`` gives now; 0 where there is none."""
        return next(iter(self.instant(expr)), 0.0)


def _numbers(samples: Any) -> list[float]:
    found = [float(value) for _, value in samples]
    return [number for number in found if not math.isnan(number)]


def eventually(condition: Callable[[], object], seconds: float = QUERY_TIMEOUT_S) -> bool:
    """Return True if the condition comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(SCRAPE_S / 4)
    return True


@contextmanager
def prometheus(folder: Path, targets: dict[str, list[str]]) -> Iterator[Prometheus]:
    """A server that scrapes these jobs every second, with the shipped rules and hurried ones."""
    binary = program("prometheus")
    hurry = folder / "hurried.yml"
    hurry.write_text(hurried("".join(path.read_text() for path in boards.RULES)))
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S:g}s", "evaluation_interval": f"{SCRAPE_S:g}s"},
        "rule_files": [*map(str, boards.RULES), str(hurry)],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": origins}]}
            for job, origins in targets.items()
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        binary,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address={url.removeprefix('http://')}",
        "--enable-feature=exemplar-storage",
    ]
    log = folder / "prometheus.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        assert eventually(lambda: _ready(url), START_TIMEOUT_S), log.read_text()[-4000:]
        server = Prometheus(url)
        yield server
        server.close()
    finally:
        process.terminate()
        process.wait(20)


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
