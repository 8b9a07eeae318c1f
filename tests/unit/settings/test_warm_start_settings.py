"""The settings of the warm start."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from leyline_proxy.settings import Settings, load_settings


@pytest.mark.parametrize(
    ("own", "named"),
    [
        ({"warm_start_path": "/w"}, "needs warm_start_key"),
        ({"warm_start_key": "k" * 16}, "needs warm_start_path"),
        ({"warm_start_path": "/w", "warm_start_key": "k" * 15}, "at least 16 characters"),
        ({"warm_start_tokens": 0}, "warm_start_tokens"),
        ({"warm_start_s": 0}, "warm_start_s"),
    ],
    ids=["no-key", "no-path", "short-key", "tokens", "seconds"],
)
def test_a_wrong_setting_is_named(own: dict[str, object], named: str) -> None:
    """A folder needs a key that can't be guessed, and the bounds are positive; no key is quoted."""
    with pytest.raises(ValidationError, match=named) as caught:
        Settings(**own)  # type: ignore[arg-type]
    assert "kkkk" not in str(caught.value)


def test_the_settings_come_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag overrides a variable, which overrides the file; a tenant can switch it off."""
    file = tmp_path / "leyline.yaml"
    file.write_text(
        "warm_start_path: /file\nwarm_start_tokens: 5000\ntenants: {red: {warm_start: false}}\n"
    )
    monkeypatch.setenv("LEYLINE_WARM_START_KEY", "k" * 16)
    monkeypatch.setenv("LEYLINE_WARM_START_TOKENS", "6000")
    settings = load_settings(file, warm_start_path=Path("/flag"))
    assert settings.warm_start_path == Path("/flag")
    assert settings.warm_start_tokens == 6000
    assert settings.tenants["red"].warm_start is False
