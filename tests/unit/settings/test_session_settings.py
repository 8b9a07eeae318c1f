"""Settings of the session store: what is missing is said before anything is served."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from leyline_proxy.cli import build_app
from leyline_proxy.settings import Settings
from leyline_proxy.wiring.stores import build_stores

SECRET = "a secret of sixteen characters or more"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"session_store": "redis://localhost"}, "session_secret"),
        ({"session_store": "redis://localhost", "session_secret": "short"}, "16 characters"),
        ({"session_store": "http://localhost", "session_secret": SECRET}, "redis://"),
        ({"session_store": "redis://h", "session_secret": SECRET, "redis_prefix": "a b"}, "prefix"),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, str], said: str) -> None:
    """A store that can't work is a usage error that names the setting and quotes no secret."""
    with pytest.raises(ValidationError, match=said) as raised:
        Settings(**given)  # type: ignore[arg-type]
    assert SECRET not in str(raised.value)


def test_the_store_is_memory_unless_said_otherwise() -> None:
    """Without a setting sessions stay in the process."""
    assert build_stores(Settings())[0].name == "memory"
    redis = Settings(session_store="redis+cluster://localhost:7000", session_secret=SECRET)
    assert build_stores(redis)[0].name == "redis"


def test_several_secrets_come_from_one_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commas part them; the first keys the histories where nothing else does."""
    monkeypatch.setenv("LEYLINE_SESSION_SECRET", f"{SECRET}1, {SECRET}2")
    settings = Settings()
    assert [each.get_secret_value() for each in settings.session_secret] == [
        f"{SECRET}1",
        f"{SECRET}2",
    ]
    assert settings.history_secret() == f"{SECRET}1"
    assert Settings(hints_secret="h").history_secret() == "h"
    monkeypatch.delenv("LEYLINE_SESSION_SECRET")
    assert Settings().history_secret() is None


def test_serve_refuses_redis_without_a_secret() -> None:
    """The command ends with a usage error before an engine is loaded."""
    result = CliRunner().invoke(build_app(), ["serve", "--session-store", "redis://127.0.0.1:1"])
    assert result.exit_code == 2
    assert "session_secret" in result.output
