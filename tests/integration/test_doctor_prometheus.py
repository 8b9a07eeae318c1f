"""The verdicts of ``leyline doctor`` on a real Prometheus."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.fake_engine import FakeEngine
from support.prometheus import eventually, prometheus
from typer.testing import CliRunner

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.cli import build_app
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings


@pytest.fixture(autouse=True)
def _keep_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands configure the process's logging, which here is pytest's."""
    monkeypatch.setattr("leyline_proxy.telemetry.logging.configure_logging", lambda *_: None)


def ask(engine: str, url: str) -> dict[str, dict[str, str]]:
    """Findings about Prometheus by name; those about the scripted engine are left out."""
    flags = ["--upstream", engine, "--port", "0", "--prometheus", url, "--json"]
    result = CliRunner().invoke(build_app(), ["doctor", *flags])
    checks = json.loads(result.stdout)["checks"]
    return {each["name"]: each for each in checks if each["name"].startswith("prometheus")}


def test_prometheus(tmp_path: Path) -> None:
    """It is green if it scrapes the proxy and has the rules; red if the proxy is down, if nothing
    listens, and if another server does."""
    with serving(FakeEngine()) as engine, ExitStack() as proxy:
        origin = proxy.enter_context(serving(create_app(Settings(upstream=engine))))
        with prometheus(tmp_path, {"leyline": [origin.removeprefix("http://")]}) as server:
            assert eventually(lambda: server.instant("leyline_build_info"))
            well = ask(engine, server.url)
            proxy.close()
            assert eventually(lambda: server.instant("up == 0"))
            down = ask(engine, server.url)
        gone = ask(engine, server.url)
        other = ask(engine, engine)
    assert {each["status"] for each in well.values()} == {"ok"}
    assert well.keys() == {f"prometheus.{name}" for name in ("reachable", "scrapes", "rules")}
    assert down["prometheus.scrapes"]["status"] == "fail"
    assert "/targets" in down["prometheus.scrapes"]["fix"]
    assert "nothing is listening" in gone["prometheus.reachable"]["detail"]
    assert other["prometheus.reachable"]["status"] == "fail"
