"""``leyline audit prove`` before proxies whose answers are no proofs of what was asked."""

from __future__ import annotations

import json
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


def answered(
    monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any], *options: str, checked: bool = True
) -> Result:
    """The command's result if the proxy answers so, signed; without a key if not ``checked``."""
    content = signed(answer, AuditKey.derive(KEY))
    monkeypatch.setattr(httpx, "post", lambda *_, **__: httpx.Response(200, json=content))
    app = typer.Typer()
    app.command()(prove)
    env = {"LEYLINE_AUDIT_KEY": KEY if checked else ""}
    return CliRunner().invoke(app, ["--session", "s1", *options], env=env)


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


def test_a_signature_that_nobody_checked_vouches_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command names a key as the signer's only if it was given that key, and it is."""
    assert "clean, signed with " in answered(monkeypatch, clean()).output
    assert "clean, signed, not checked" in answered(monkeypatch, clean(), checked=False).output
    forged = {**clean(), "key": AuditKey.derive(KEY).id, "signature": "00"}
    monkeypatch.setattr(f"{__name__}.signed", lambda answer, _: answer)
    found = answered(monkeypatch, forged)
    assert found.exit_code == 1
    assert "isn't the key's" in found.output and "signed with" not in found.output


def test_a_file_that_cant_be_written_stops_the_forget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The file is opened before the proxy is asked, and keeps its content until then."""
    found = answered(monkeypatch, {}, "--json", str(tmp_path / "no" / "proof.json"))
    assert found.exit_code == 2 and "can't be written" in found.output + found.stderr
    out = tmp_path / "proof.json"
    out.write_text("an earlier one", encoding="utf-8")
    assert answered(monkeypatch, {}, "--json", str(out)).exit_code == 2
    assert out.read_text(encoding="utf-8") == "an earlier one"
    assert answered(monkeypatch, clean(), "--json", str(out)).exit_code == 0
    assert json.loads(out.read_text(encoding="utf-8"))["verdict"] == "clean"
    assert answered(monkeypatch, clean(), "--json", "/dev/null").exit_code == 0
