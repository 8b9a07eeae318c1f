"""Commands, settings and refusals of ``leyline bench outside``, without running anything."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from leyline_lab.errors import EndpointError, MissingError, PlanError
from leyline_lab.files import sole_user, write_whole
from leyline_lab.outside.arms import (
    PROFILE_SETTING,
    OutsideArm,
    arm_settings,
    benchmark_environment,
    check_profile,
    isolation_settings,
    proxy_environment,
    without_settings,
)
from leyline_lab.outside.benchmarks import Endpoint
from leyline_lab.outside.command import command
from leyline_lab.outside.endpoint import Engine
from leyline_lab.outside.running import EngineWatch, check_docker, check_engine
from leyline_lab.outside.tasks import Selection
from leyline_proxy.settings import Settings, load_settings
from leyline_proxy.tenants.directory import build_directory

POLICY = "truncate_older_than:n=2,max_chars=200"
URL = ("--upstream", "http://gpu1:30000/v1", "--model", "org/model")


def run(*options: str) -> tuple[int, str]:
    """Exit code and output of the command."""
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, [*URL, *options])
    return result.exit_code, result.output


def dry(tmp_path: Path, *options: str) -> list[list[str]]:
    """The words of each line of a dry run, without comments."""
    code, output = run("--dry-run", "--out", str(tmp_path / "out"), *options)
    assert code == 0, output
    assert not (tmp_path / "out").exists()
    lines = [line for line in output.splitlines() if line and not line.startswith("#")]
    return [shlex.split(line, comments=True) for line in lines if "'" not in line[:1]]


def flat(lines: list[list[str]], marker: str) -> list[list[str]]:
    """The lines that name a program or a flag."""
    return [words for words in lines if any(marker in word for word in words)]


def test_a_dry_run_prints_every_arm(tmp_path: Path) -> None:
    """Install, proxy with the arm's settings, benchmark and scoring, for each arm; nothing is
    written."""
    lines = dry(tmp_path, "--benchmark", "complexity-trap", "--tasks", "3", "--workers", "2")
    checkout = str(Path("the-complexity-trap").resolve())
    assert flat(lines, "checkout")[0][:4] == ["git", "-C", checkout, "checkout"]
    proxies = flat(lines, "serve")
    assert [("LEYLINE_SPLICE=false" in words) for words in proxies] == [True, False]
    assert all("LEYLINE_POLICY=last_n_observations:n=10" in words for words in proxies)
    assert all("http://gpu1:30000" in words for words in proxies)
    agents = flat(lines, "run-batch")
    assert len(agents) == 2
    assert agents[0][agents[0].index("--instances.slice") + 1] == ":3"
    assert "openai/org/model" in agents[0]
    assert "config/default_no_demo_raw.yaml" in agents[0]
    assert agents[0][-1] == f"{tmp_path}/out/re-prefill/run-1/results)"
    assert f"{checkout}/.venv/bin/sweagent" in agents[0]
    assert len(flat(lines, "swebench.harness.run_evaluation")) == 2


@pytest.mark.parametrize(
    ("benchmark", "variable", "words"),
    [
        ("debug-gym", "LLM_CONFIG_FILE_PATH=", "dataset.problems=[counter,sum_tree]"),
        ("complexity-trap", "OPENAI_BASE_URL=http://127.0.0.1:PORT/v1", "^(counter|sum_tree)$"),
        ("loca-bench", "LOCA_OPENAI_BASE_URL=http://127.0.0.1:PORT/v1", "--max-context-size"),
    ],
)
def test_commands_name_tasks_and_proxy(
    tmp_path: Path, benchmark: str, variable: str, words: str
) -> None:
    """Each benchmark gets the proxy's address in its own way, and its own selection of tasks."""
    lines = dry(tmp_path, "--benchmark", benchmark, "--tasks", "counter,sum_tree", "--repeat", "2")
    steps = flat(lines, variable)
    assert len(steps) == 4
    assert all(any(words in word for word in step) for step in steps)


def test_a_command_of_the_users_is_run_as_given(tmp_path: Path) -> None:
    """Its words stay, extra arguments follow, and the command in front of each run is printed."""
    options = ("--benchmark", "custom", "--command", "python 'my agent.py'", "--extra=--fast")
    lines = dry(tmp_path, *options, "--between", "curl -X POST http://gpu1:30000/flush_cache")
    (step, _) = flat(lines, "BENCH_FOLDER=")
    assert step[-3:] == ["python", "my agent.py", "--fast)"]
    assert len(flat(lines, "flush_cache")) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--benchmark", "debug-gym"), "--checkout DIR"),
        (("--benchmark", "debug-gym", "--checkout", "/nowhere"), "no checkout of https://github"),
        (("--benchmark", "custom"), "needs --command"),
        (("--benchmark", "loca-bench", "--command", "x"), "no other benchmark takes one"),
        (("--benchmark", "custom", "--command", "'"), "open quote"),
        (("--benchmark", "custom", "--command", "x", "--results", "csv"), "one of: lines"),
        (("--benchmark", "custom", "--command", "x", "--tasks", "a,a"), "different ids"),
        (("--benchmark", "custom", "--command", "x", "--arms", "radix"), "no arm 'radix'"),
        (("--benchmark", "custom", "--command", "x", "--policy", "trunc"), "--policy:"),
        (("--benchmark", "custom", "--command", "x", "--upstream", "gpu1"), "http://gpu1:30000"),
        (("--benchmark", "custom", "--command", "x", "--arms", "splice+profile"), "--profile FILE"),
    ],
)
def test_what_cannot_run_is_one_line(options: tuple[str, ...], words: str) -> None:
    """The line names the option, the status is 2, and nothing was started."""
    code, output = run(*options)
    assert code == 2
    assert words in output
    assert output.startswith("leyline bench outside: ")
    assert len(output.strip().splitlines()) == 1


def test_an_uninstalled_checkout_is_named(tmp_path: Path) -> None:
    """A clone without its environment isn't run."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "run.py").touch()
    code, output = run("--benchmark", "debug-gym", "--checkout", str(tmp_path))
    assert code == 2
    assert "isn't installed: .venv has no python" in output
    assert "--dry-run" in output


@pytest.mark.parametrize("program", [None, "#!/bin/sh\nexit 1\n"])
def test_docker_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str | None
) -> None:
    """Neither a machine without docker nor one whose daemon is down begins a run."""
    monkeypatch.setenv("PATH", str(tmp_path))
    if program is not None:
        (tmp_path / "docker").write_text(program)
        (tmp_path / "docker").chmod(0o755)
    with pytest.raises(MissingError, match="in containers"):
        check_docker("debug-gym")


def test_arms_are_settings_of_the_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy that reads an arm's variables splices or not, edits at once, and lets only the
    run's key in; the user's own settings don't reach it."""
    user = {"LEYLINE_SPLICE": "true", "LEYLINE_REUSE": "live", "LEYLINE_UPSTREAM_API_KEY": "sk-1"}
    for arm in (OutsideArm.RE_PREFILL, OutsideArm.SPLICE):
        chosen = arm_settings(arm, POLICY, None) | isolation_settings("b-1", "KEY", isolates=True)
        environment = proxy_environment(user, chosen)
        for name in user:
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        settings = load_settings(upstream="http://e:1")
        assert settings.splice is arm.splices
        assert (settings.policy, settings.edit_timing, settings.reuse) == (POLICY, "now", "off")
        assert settings.upstream_api_key is not None
        tenant = build_directory(settings).authenticate({"authorization": "Bearer KEY"})
        assert (tenant.name, tenant.cache_salt is not None) == ("b-1", True)
    assert without_settings(environment | {"PATH": "/bin"}) == {"PATH": "/bin"}


def test_a_benchmark_reaches_the_proxy_directly() -> None:
    """Hosts that the user's web proxy leaves alone stay, and this machine is one of them."""
    variables = Endpoint("http://127.0.0.1:1/v1", "KEY").variables()
    user = {"NO_PROXY": "hub.corp", "LEYLINE_UPSTREAM_API_KEY": "sk-1", "PATH": "/bin"}
    found = benchmark_environment(user, variables)
    assert found["NO_PROXY"] == "hub.corp,127.0.0.1,localhost"
    assert found["no_proxy"] == "127.0.0.1,localhost"
    assert (found["PATH"], found["OPENAI_API_KEY"]) == ("/bin", "KEY")
    assert not [name for name in found if name.startswith("LEYLINE_")]


def test_runs_of_an_engine_that_isolates_have_salts_of_their_own() -> None:
    """Two runs differ in their tenant, from which the salt is made; other engines share."""
    one, other = (isolation_settings(name, "K", isolates=True) for name in ("a", "b"))
    assert one["LEYLINE_API_KEYS"] != other["LEYLINE_API_KEYS"]
    assert one["LEYLINE_CACHE_SCOPE"] == "tenant"
    assert isolation_settings("a", "K", isolates=False)["LEYLINE_CACHE_SCOPE"] == "shared"


def test_the_profile_arm_needs_profile_and_setting(tmp_path: Path) -> None:
    """It is refused without the file and by a proxy that has no such setting; with both, the arm
    sets it and splices."""
    arms = (OutsideArm.SPLICE, OutsideArm.SPLICE_PROFILE)
    profile = tmp_path / "profile.json"
    with pytest.raises(MissingError, match="there is no profile"):
        check_profile(arms, profile, {PROFILE_SETTING})
    profile.write_text("{}")
    with pytest.raises(MissingError, match="no setting fidelity_profile"):
        check_profile(arms, profile, {"splice"})
    with pytest.raises(MissingError, match="--profile FILE"):
        check_profile(arms, None, Settings.model_fields)
    check_profile(arms, profile, {PROFILE_SETTING})
    check_profile(arms[:1], None, ())
    settings = arm_settings(OutsideArm.SPLICE_PROFILE, POLICY, profile)
    assert settings["LEYLINE_FIDELITY_PROFILE"] == str(profile)
    assert settings["LEYLINE_SPLICE"] == "true"
    assert "LEYLINE_FIDELITY_PROFILE" not in arm_settings(OutsideArm.SPLICE, POLICY, profile)


def test_patience_begins_again_when_the_engine_is_back() -> None:
    """An engine may be away for the patience, again and again, and not for longer."""
    clock, answers = [0.0], [True]
    watch = EngineWatch(lambda: answers[0], 5, lambda: clock[0])

    def at(now: float, up: bool) -> None:
        clock[0], answers[0] = now, up
        watch.look()

    for now in (2, 4, 6):
        at(now, up=True)
    for now in (8, 11):
        at(now, up=False)
    at(11.5, up=True)  # too soon to look
    with pytest.raises(EndpointError, match="for 5 s"):
        at(12.1, up=False)
    at(13.2, up=True)
    at(18.1, up=False)
    with pytest.raises(EndpointError, match="for 5 s"):
        at(19.2, up=False)


def test_an_engine_that_does_not_splice_serves_re_prefill_alone() -> None:
    """Two equal arms would look like a finding."""
    plain = Engine("unknown", splices=False, isolates=False, obstacle="its KV is FP8")
    check_engine(plain, (OutsideArm.RE_PREFILL,))
    with pytest.raises(EndpointError, match="its KV is FP8"):
        check_engine(plain, (OutsideArm.RE_PREFILL, OutsideArm.SPLICE))


@pytest.mark.parametrize("text", ["0", "1,2", "", "a b", "a;rm", "../x", "a,,a"])
def test_a_selection_is_a_number_or_ids(text: str) -> None:
    """Anything else is refused, and nothing that a shell or a path would understand gets in."""
    with pytest.raises(PlanError):
        Selection.parse(text)
    assert str(Selection.parse("a/state0,b__c-1")) == "a/state0,b__c-1"
    assert (str(Selection.parse("12")), str(Selection.parse(None))) == ("12", "all")


def test_a_folder_has_one_user_and_whole_files(tmp_path: Path) -> None:
    """A second command is refused while the first one holds the folder, and a file that can't be
    written leaves no part."""
    with (
        sole_user(tmp_path),
        pytest.raises(PlanError, match="another command"),
        sole_user(tmp_path),
    ):
        pytest.fail("both have it")
    with sole_user(tmp_path):
        pass
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_whole(tmp_path / "taken", "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "taken"]
