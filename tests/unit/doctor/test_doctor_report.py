"""Settings with errors: doctor reports them, and examines everything else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from leyline_proxy.cli import build_app
from leyline_proxy.doctor import Check, Situation, checks_for
from leyline_proxy.doctor.examination import without_missing
from leyline_proxy.settings import Settings
from leyline_proxy.settings.readable import ReadablePart

DEAD = "http://127.0.0.1:9"


def report(*flags: str) -> list[dict[str, Any]]:
    """The findings of ``leyline doctor`` with these flags; it fails."""
    done = CliRunner().invoke(build_app(), ["doctor", "--json", *flags])
    assert done.exit_code == 1, done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)["checks"]
    return found


def test_a_missing_secret_hides_no_dead_engine_and_no_dead_redis() -> None:
    """The first finding names the command that makes a secret; the engine and Redis are asked all
    the same, and nothing says that sessions are encrypted."""
    found = report("--session-store", "redis://127.0.0.1:9/0", "--upstream", DEAD, "--port", "0")
    failed = {each["name"]: each for each in found if each["status"] == "fail"}
    assert found[0]["name"] == "config"
    assert 'LEYLINE_SESSION_SECRET="$(openssl rand -hex 32)"' in found[0]["fix"]
    assert failed.keys() == {"config", "redis.reachable", "upstream.engine.reachable"}
    assert not any(each["name"] == "session-secret" for each in found)
    assert ("config", "ok") not in {(each["name"], each["status"]) for each in found}


def test_a_setting_that_can_not_be_read_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report says without which settings the rest is examined; an engine whose address is wrong
    isn't taken for the embedded one."""
    monkeypatch.setenv("LEYLINE_RETAINED_TURNS", "many")
    found = report("--upstream", DEAD, "--port", "0")
    assert [each["name"] for each in found if each["status"] == "fail"] == [
        "config",
        "upstream.engine.reachable",
    ]
    note = next(each for each in found if each["status"] == "skip")
    assert note["detail"] == "the rest is examined without retained_turns"
    wrong = report("--upstream", "gpu1:30000", "--port", "0")
    assert {each["name"] for each in wrong if each["status"] == "fail"} == {"config"}
    assert not any(each["name"].startswith("upstream.") for each in wrong)


def test_checks_name_settings_that_there_are() -> None:
    """A check that is left out is one of the table, and only for its own settings."""
    settings = Settings(upstream=DEAD)
    checks: dict[str, Check] = checks_for(Situation(settings))
    whole = ReadablePart(settings)
    assert without_missing(checks, whole) == checks
    for name in ("session_store", "api_keys", "policy", "port", "audit_file", "recall_key"):
        left = without_missing(checks, ReadablePart(settings, frozenset({name})))
        assert left.keys() < checks.keys()
        assert "upstream.engine" in left
