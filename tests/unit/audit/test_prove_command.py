"""``leyline audit prove`` before proxies whose answers are no proofs of what was asked."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from typer.testing import CliRunner, Result

from leyline_proxy.audit.chain import AuditKey
from leyline_proxy.audit.proofs import signed
from leyline_proxy.cli.prove import prove

KEY = "a key of the audit log"


def answered(monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any], *options: str) -> Result:
    """The command's result if the proxy answers so, signed."""
    content = signed(answer, AuditKey.derive(KEY))
    monkeypatch.setattr(httpx, "post", lambda *_, **__: httpx.Response(200, json=content))
    app = typer.Typer()
    app.command()(prove)
    return CliRunner().invoke(app, ["--session", "s1", *options], env={"LEYLINE_AUDIT_KEY": KEY})


def clean(**changes: Any) -> dict[str, Any]:
    """A clean proof, made now."""
    return {
        "session": "s1",
        "tenant": "default",
        "spans": [],
        "time": datetime.now(UTC).isoformat(),
        "verdict": "clean",
        "unreachable": False,
        "engines": [],
        "places": [],
        "responses": {"held": 0, "deleted": 0},
        **changes,
    }


EARLIER = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "another session": (clean(session="s2"), "another session"),
    "spans instead of everything": (clean(spans=["t1.0"]), "another span"),
    "an earlier proof": (clean(time=EARLIER), "before it was asked for"),
    "no time": (clean(time=None), "has no time"),
    "a time without a zone": (clean(time="2026-01-01T00:00:00"), "has no time"),
}


def test_the_proof_that_was_asked_for_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof of this session, made now and signed, exits with 0."""
    assert answered(monkeypatch, clean()).exit_code == 0


@pytest.mark.parametrize("name", OTHERS)
def test_a_signed_proof_of_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A signature doesn't make an earlier proof, or that of another session, the one asked for."""
    answer, problem = OTHERS[name]
    result = answered(monkeypatch, answer)
    assert result.exit_code == 1 and problem in result.output
    result = answered(monkeypatch, answer, "--json", "-")
    assert result.exit_code == 1 and problem in result.stderr


def test_another_tenants_proof_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tenant, the proof must be of that one."""
    result = answered(monkeypatch, clean(tenant="blue"), "--tenant", "red")
    assert result.exit_code == 1 and "another tenant" in result.output


def test_an_answer_that_lacks_members_is_no_proof(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It exits with 2, as the proxy can't have meant it, and writes nothing."""
    answer = clean()
    del answer["engines"]
    out = tmp_path / "proof.json"
    assert answered(monkeypatch, answer, "--json", str(out)).exit_code == 2
    assert not out.exists()
