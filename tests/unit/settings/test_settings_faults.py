"""Broken configurations are reported by line, variable or flag, with the fix, without a value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from pydantic_settings import SettingsError

from leyline_policies import SpecError
from leyline_proxy.settings import Settings, load_settings
from leyline_proxy.settings.faults import Fault, Sources, fault_of_start, faults_of
from leyline_proxy.settings.file import ConfigError, read_config
from leyline_proxy.settings.readable import readable_part
from leyline_proxy.tenants import build_directory

SECRET = "hunter2-hunter2-hunter2"


def faults(config: Path | None = None, flags: dict[str, str] | None = None, **environ: str) -> str:
    """All faults of these sources, as an operator reads them; flags by setting."""
    given = flags or {}
    sources = Sources(config, {name: f"--{name.replace('_', '-')}" for name in given}, environ)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        try:
            load_settings(config, **given)
        except (OSError, ValueError) as error:
            return "\n".join(map(str, faults_of(error, sources)))
    return ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "host: h\nprot: 1\n",
            ["leyline.yaml:2:1: prot is not a setting", "fix: Did you mean 'port'"],
        ),
        (
            "host: h\nport: x\n",
            ["leyline.yaml:2:1: port: ", "valid integer"],
        ),
        (
            "upstreams:\n  a:\n    url: gpu\n",
            ["leyline.yaml:3:5: upstreams.a.url: must start with"],
        ),
        ("upstreams: {a: gpu}\n", ["leyline.yaml:1:13: upstreams.a.url: must start with"]),
        ("tenants:\n  red: {wieght: 2}\n", ["leyline.yaml:2:9: tenants.red.wieght", "'weight'"]),
        (
            "tenants:\n  red: {api_keys: [k, {}]}\n",
            ["leyline.yaml:2:23: tenants.red.api_keys.1"],
        ),
        (
            "budgets: [{window: day, token: 1}]\n",
            ["leyline.yaml:1:25: budgets.0.token is not a setting", "fix: Did you mean 'tokens'?"],
        ),
        (
            "tenants: {red: {budgets: [{windw: day, tokens: 1}]}}\n",
            ["tenants.red.budgets.0.window is missing", "Add window.", "Did you mean 'window'?"],
        ),
        ("budgets: {window: day}\n", ["leyline.yaml:1:1: budgets must be a list"]),
        ("budgets: [{window: day}]\n", ["budgets.0: a budget needs"]),
        ("prices: {m: {cahced: 1}}\n", ["prices.m.currency is missing", "Did you mean 'cached'?"]),
        ("a: [1\n", ["leyline.yaml:2:1: no YAML"]),
        ("port: 1\nport: 2\n", ["leyline.yaml:2:1: 'port' is set twice; first in line 1"]),
        ("- port\n", ["leyline.yaml:1:1: settings are written as NAME: VALUE"]),
        (
            "metrics_on_admin: true\n",
            ["leyline.yaml:1:1: metrics_on_admin needs an admin_port", "fix: Change or remove"],
        ),
        (
            f"session_store: redis://:{SECRET}@h/0\n",
            [
                "leyline.yaml:1:1: session_store in Redis",
                'fix: Make one: export LEYLINE_SESSION_SECRET="$(openssl rand -hex 32)", the same',
            ],
        ),
        (
            "session_secret: [short]\n",
            ["leyline.yaml:1:1: session_secret must have", "LEYLINE_SESSION_SECRET="],
        ),
        (
            "admin_port: 1\n",
            ["admin_port needs an admin_key", 'export LEYLINE_ADMIN_KEY="$(openssl rand -hex 32)"'],
        ),
        (
            "warm_start_path: /x\n",
            ["warm_start_path needs warm_start_key", "export LEYLINE_WARM_START_KEY="],
        ),
        (f"api_keys: ['red:sha256:{SECRET}']\n", ["leyline.yaml:1:1: api_keys: sha256: must"]),
        (f"tenants:\n  a: {{api_keys: '{SECRET} x'}}\n", ["leyline.yaml:2:7: tenants.a.api_keys"]),
        (
            f"tenants:\n  a: {{api_keys: ['{SECRET} x']}}\n",
            ["yaml:1:1: tenants.a.api_keys"],
        ),
        (f"admin_key: {{a: {SECRET}}}\n", ["leyline.yaml:1:1: admin_key: ", "string"]),
        (
            f"session_store: redis://:a/{SECRET}@h/0\nhints_secret: {SECRET}\n",
            ["leyline.yaml:1:1: session_store isn't a URL", "%XX"],
        ),
        (
            f"session_store: redis://h/0?db=1&password={SECRET}\nhints_secret: {SECRET}\n",
            ["leyline.yaml:1:1: session_store takes no option after its ? but db"],
        ),
        (
            f"session_store: redis://h\nhints_secret: {SECRET}\nredis_ca_file: f\n",
            ["leyline.yaml:3:1, ", "leyline.yaml:1:1: redis_ca_file needs", "rediss://"],
        ),
        (
            f"admin_key: {SECRET}\nadmin_port: 8790\n",
            ["leyline.yaml:2:1: admin_port must differ from port"],
        ),
        (
            f"admin_key: {SECRET}\nadmin_port: 80\nport: 80\nhost: 0.0.0.0\n",
            ["leyline.yaml:2:1, ", "leyline.yaml:3:1: admin_port must differ from port"],
        ),
        (f"policy: {SECRET}\nedit_timing: never\n", ["leyline.yaml:2:1: edit_timing: ", "'wait'"]),
    ],
)
def test_a_fault_in_the_file_has_its_line(text: str, expected: list[str], tmp_path: Path) -> None:
    """File, line, column and what is wrong; nothing of the values."""
    config = tmp_path / "leyline.yaml"
    config.write_text(text)
    told = faults(config)
    assert not [words for words in expected if words not in told], told
    assert SECRET not in told


def test_a_fault_is_the_writers_who_wins(tmp_path: Path) -> None:
    """Flags win over variables, and those over the file: the one that counts is named."""
    config = tmp_path / "leyline.yaml"
    config.write_text("port: x\n")
    assert f"{config}:1:1" in faults(config)
    assert faults(config, LEYLINE_PORT="y").startswith("LEYLINE_PORT: port: ")
    assert faults(config, {"port": "z"}, LEYLINE_PORT="y").startswith("--port: port: ")
    assert f"{config}:1:1" in faults(config, LEYLINE_PORT="")
    assert "LEYLINE_TENANTS: isn't valid JSON" in faults(LEYLINE_TENANTS=f"{{{SECRET}")
    assert SECRET not in faults(LEYLINE_TENANTS=f"{{{SECRET}")


def test_a_wrong_policy_of_a_tenant_is_placed(tmp_path: Path) -> None:
    """Whatever characters its name has."""
    config = tmp_path / "leyline.yaml"
    config.write_text("tenants:\n  team.my-one: {policy: no_such}\n")
    with pytest.raises(SpecError) as caught:
        build_directory(load_settings(config))
    fault = fault_of_start(caught.value, Sources(config))
    assert fault.place.endswith("leyline.yaml:2:17")
    assert fault.problem.startswith("tenants.team.my-one.policy: no policy is called 'no_such'")
    assert fault.fix == ""


def test_objects_of_variables_and_of_the_file_are_put_together(tmp_path: Path) -> None:
    """A fault is reported for the source of its member."""
    config = tmp_path / "leyline.yaml"
    config.write_text("tenants: {red: {wieght: 2}}\n")
    assert f"{config}:1:17: tenants.red.wieght" in faults(config, LEYLINE_TENANTS='{"blue": {}}')
    told = faults(config, LEYLINE_TENANTS='{"red": {"wieght": 3}}')
    assert told.startswith("LEYLINE_TENANTS: tenants.red.wieght")


def test_two_ports_of_two_addresses_may_be_equal() -> None:
    """Only what would be one place is refused, and a port that the system chooses never is."""
    apart = load_settings(host="10.0.0.1", port=80, admin_port=80, admin_key=SECRET)
    assert apart.port == apart.admin_port
    load_settings(port=0, admin_port=0, admin_key=SECRET)
    for one_place in (
        {},
        {"host": "10.0.0.1", "admin_host": "10.0.0.1"},
        {"host": "0.0.0.0"},  # noqa: S104
        {"host": "::"},
        {"host": "10.0.0.1", "admin_host": "0.0.0.0"},  # noqa: S104
        {"host": "10.0.0.1", "admin_host": ""},
    ):
        with pytest.raises(ValueError, match="admin_port must differ from port"):
            load_settings(port=80, admin_port=80, admin_key=SECRET, **one_place)


def test_every_fault_is_told_at_once(tmp_path: Path) -> None:
    """No one has to fix one, start again, and meet the next."""
    config = tmp_path / "leyline.yaml"
    config.write_text("port: x\nlog_level: loud\nmodle: m\n")
    told = faults(config)
    assert [f"leyline.yaml:{line}:1: " in told for line in (1, 2, 3)] == [True] * 3


def test_files_that_are_no_settings(tmp_path: Path) -> None:
    """A folder, other bytes than UTF-8, too many of them, and aliases that multiply."""
    config = tmp_path / "leyline.yaml"
    assert "no configuration file" in faults(config)
    assert "Is a directory" in faults(tmp_path)
    bombs = "a: &a [x, x]\n" + "".join(
        f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
        for before, name in zip("abcdefg", "bcdefgh", strict=True)
    )
    for content, words in (
        (b"port: 1\n\xff: 2\n", "leyline.yaml:2:1: is no UTF-8"),
        (b"#" * 2_000_000, "larger than"),
        (bombs.encode(), "values, aliases written out"),
    ):
        config.write_bytes(content)
        assert words in faults(config)


@pytest.mark.parametrize("text", ["", "# nothing\n\n", "---\n", "\ufeffport: 8791\n"])
def test_files_that_say_little(text: str, tmp_path: Path) -> None:
    """Nothing, comments, and a byte order mark before the first setting are no fault."""
    config = tmp_path / "leyline.yaml"
    config.write_text(text)
    assert faults(config) == ""
    assert load_settings(config).port == (8791 if "port" in text else 8790)
    with pytest.raises(ConfigError):
        read_config(tmp_path)


def test_an_error_of_another_kind_is_told_as_it_is() -> None:
    """Nothing is swallowed."""
    assert faults_of(ValueError("why"), Sources()) == [Fault("", "why", "")]


def test_no_fix_repeats_that_a_value_must_change() -> None:
    """A fault whose message says all has no line for a fix."""
    for given in ({"LEYLINE_PORT": "x"}, {"LEYLINE_HOST": "h", "LEYLINE_WORKERS": "0"}):
        assert "fix:" not in faults(**given)
        assert faults(**given)


def test_the_rest_of_the_settings_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings with errors are left out, whichever source has them; a missing secret of sessions
    has a stand-in, which is no longer the operator's."""
    config = tmp_path / "leyline.yaml"
    config.write_text(f"session_store: redis://:{SECRET}@h/0\nprot: 1\nretained_turns: 7\n")
    monkeypatch.setenv("LEYLINE_PORT", "x")

    def read(without: Collection[str] = (), others: Mapping[str, Any] | None = None) -> Settings:
        return load_settings(config, without=without, upstream="http://gpu", **(others or {}))

    with pytest.raises(ValidationError) as caught:
        read()
    part = readable_part(read, caught.value)
    assert part is not None
    assert (part.missing, part.invented) == ({"port", "prot"}, {"session_secret"})
    assert (part.settings.port, part.settings.retained_turns) == (8790, 7)
    assert part.settings.session_store.get_secret_value() == f"redis://:{SECRET}@h/0"
    assert part.settings.upstream == "http://gpu"
    assert readable_part(read, FileNotFoundError("no file")) is None


def test_variables_that_are_no_json_hide_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is left out, with its parts; the errors that they hid come to light."""
    environ = {
        "LEYLINE_UPSTREAMS": "{not json",
        "LEYLINE_PRICES": "[",
        "LEYLINE_PRICES__PROMPT": "1",
        "LEYLINE_PORT": "x",
        "LEYLINE_RETAINED_TURNS": "7",
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    def read(without: Collection[str] = (), given: Mapping[str, Any] | None = None) -> Settings:
        return load_settings(without=without, **(given or {}))

    with pytest.raises(SettingsError) as caught:
        read()
    part = readable_part(read, caught.value)
    assert part is not None
    assert part.missing == {"upstreams", "prices", "port"}
    assert (part.settings.port, part.settings.retained_turns) == (8790, 7)
    found = [caught.value, *part.later]
    said = "\n".join(str(each) for error in found for each in faults_of(error, Sources()))
    for name in ("upstreams", "prices", "port"):
        assert said.count(f"{name}: ") == 1, said
