"""Settings: precedence of the sources, and errors that name the setting."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from leyline_proxy.settings import Settings, load_settings
from leyline_proxy.settings.api_keys import parse_key
from leyline_proxy.tenants import build_directory


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("LEYLINE_"):
            monkeypatch.delenv(name)


def test_defaults_serve_locally() -> None:
    """Without any setting the proxy listens on loopback and runs its own engine."""
    settings = load_settings()
    assert (settings.host, settings.port) == ("127.0.0.1", 8790)
    assert (settings.upstream, settings.engine) == (None, "replay")
    assert (settings.retained_turns, settings.max_body_bytes) == (4, 32 * 1024 * 1024)


def test_flags_win_over_environment_over_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each source overrides the one below it, setting by setting."""
    config = tmp_path / "leyline.yaml"
    config.write_text("port: 1\nhost: file\nmodel: file\nundeclared: {tool: amortize}\n")
    monkeypatch.setenv("LEYLINE_PORT", "2")
    monkeypatch.setenv("LEYLINE_HOST", "environment")
    settings = load_settings(config, port=3, host=None)
    assert (settings.port, settings.host, settings.model) == (3, "environment", "file")
    assert settings.undeclared == {"tool": "amortize"}


def test_lists_in_the_environment_are_comma_separated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and rules need no JSON in an environment variable."""
    monkeypatch.setenv("LEYLINE_API_KEYS", "red:k1, blue:k2")
    monkeypatch.setenv("LEYLINE_UNDECLARED", "tool=amortize,user=exact")
    settings = Settings()
    assert [secret.get_secret_value() for secret in settings.api_keys] == ["red:k1", "blue:k2"]
    assert settings.undeclared == {"tool": "amortize", "user": "exact"}


def test_keys_come_from_all_three_places(tmp_path: Path) -> None:
    """Pairs, the key file and tenant entries add up, plain and hashed."""
    keys = tmp_path / "keys"
    keys.write_text("# comment\nred:k2\n\n")
    settings = load_settings(
        api_keys=["red:k1"], api_keys_file=keys, tenants={"blue": {"api_keys": ["k3"]}}
    )
    directory = build_directory(settings)
    found = {key: directory.authenticate({"api-key": key}).name for key in ("k1", "k2", "k3")}
    assert found == {"k1": "red", "k2": "red", "k3": "blue"}


@pytest.mark.parametrize("value", ['["red:hunter2","blue:hunter2"]', '{"red": "hunter2"}'])
def test_keys_as_json_are_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the setting and the form, and quotes no key: no tenant has a bracket."""
    monkeypatch.setenv("LEYLINE_API_KEYS", value)
    with pytest.raises(
        ValidationError, match=r"api_keys: .*tenant:key.*separated by comma"
    ) as found:
        load_settings()
    assert "hunter2" not in str(found.value)
    monkeypatch.setenv("LEYLINE_API_KEYS", "red:hunter2, blue:hunter3")
    assert len(load_settings().api_keys) == 2


def test_wrong_settings_are_named_without_their_secrets(tmp_path: Path) -> None:
    """A typo in the file, a bad rule and a bad key are reported by name, the key's text not."""
    config = tmp_path / "leyline.yaml"
    config.write_text("prot: 1\n")
    with pytest.raises(ValidationError, match="prot"):
        load_settings(config)
    with pytest.raises(ValidationError, match="64 hexadecimal") as hidden:
        load_settings(api_keys=["red:sha256:hunter2"])
    assert "hunter2" not in str(hidden.value)
    with pytest.raises(ValidationError, match="ROLE=MODE"):
        load_settings(undeclared=["tool"])
    with pytest.raises(ValueError, match="tenant:key") as caught:
        parse_key("hunter2")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ValueError, match="can't be read"):
        build_directory(load_settings(api_keys_file=tmp_path / "none"))
    with pytest.raises(FileNotFoundError):
        load_settings(tmp_path / "none")


def test_a_loop_that_isnt_installed_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that a setting names must be there; ``auto`` does without."""
    monkeypatch.setattr("leyline_proxy.settings.proxy.find_spec", lambda _: None)
    assert load_settings().loop == "auto"
    with pytest.raises(ValueError, match="uvloop isn't installed"):
        load_settings(loop="uvloop")


def test_secrets_are_not_shown() -> None:
    """Printing the settings shows no key."""
    settings = load_settings(api_keys=["red:hunter2"], upstream_api_key="hunter2")
    assert "hunter2" not in repr(settings)


def test_the_upstream_is_a_base_url() -> None:
    """A trailing slash and the version that clients add are taken off; other schemes refused."""
    assert load_settings(upstream="http://gpu1:30000/v1/").upstream == "http://gpu1:30000"
    with pytest.raises(ValidationError, match="end with its path"):
        load_settings(upstream="http://gpu1:30000/?api-version=1")
    with pytest.raises(ValidationError, match="http://"):
        load_settings(upstream="gpu1:30000")
