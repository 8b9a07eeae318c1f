"""``leyline policies``: what is listed, explained, tried and written, as an operator sees it."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from leyline_policies import FunctionPolicy, Message, Registry, edit, load_pipeline
from leyline_policies.builtin import BUILTINS
from leyline_policies.testing import synthetic_sessions
from leyline_proxy.cli import build_app
from leyline_proxy.cli.policy_catalogue import examples
from leyline_proxy.cli.policy_scaffold import ScaffoldError, package_files, write_package

LEYLINE = str(Path(sys.executable).parent / "leyline")
BROKEN = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "leyline-broken-plugin"
version = "9.9"

[project.entry-points."leyline.policies"]
broken = "broken_plugin:Anything"

[tool.setuptools]
py-modules = ["broken_plugin"]
"""


def run(*arguments: str) -> tuple[int, str]:
    """Exit code and output of ``leyline policies``."""
    result = CliRunner().invoke(build_app(), ["policies", *arguments])
    return result.exit_code, result.output


def flat(output: str) -> str:
    """Output without its line breaks and runs of spaces."""
    return " ".join(output.split())


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """A file of chat requests, one made-up session per line."""
    file = tmp_path / "sessions.jsonl"
    talks = [list(session[-1]) for session in synthetic_sessions(0, sessions=3)]
    file.write_text("".join(json.dumps({"model": "m", "messages": talk}) + "\n" for talk in talks))
    return file


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package that ``new`` writes, and a broken one, installed by pip."""
    work, target = tmp_path_factory.mktemp("work"), tmp_path_factory.mktemp("site")
    assert run("new", "short_pastes", "--dir", str(work))[0] == 0
    broken = work / "broken"
    broken.mkdir()
    (broken / "pyproject.toml").write_text(BROKEN)
    (broken / "broken_plugin.py").write_text("raise RuntimeError('needs a newer world')\n")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-index", "--no-deps", "--no-build-isolation", "--target", str(target)]
    sources = [str(work / "short_pastes"), str(broken)]
    result = subprocess.run([*command, *sources], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    (target / "tests").symlink_to(work / "short_pastes" / "tests")
    return target


def installed(site: Path, *command: str, width: int = 200) -> str:
    """Output of a command that sees the installed packages."""
    env = {**os.environ, "PYTHONPATH": str(site), "COLUMNS": str(width)}
    result = subprocess.run(
        [*command], env=env, capture_output=True, text=True, check=False, cwd=site
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("command", ["list", "show", "try", "new", "schema"])
def test_help_teaches(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command says what it does; those with arguments show a line to copy."""
    monkeypatch.setenv("COLUMNS", "120")
    code, output = run(command, "--help")
    assert code == 0
    if command != "list":
        assert "Example:  leyline policies" in output
    if command == "try":
        for part in ("unedited", "prefix", "splice", "four characters"):
            assert part in output


@pytest.mark.parametrize("width", ["80", "160"])
def test_list_names_every_policy(width: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every built-in policy is listed with its mode and what it does; wide, with parameters."""
    monkeypatch.setenv("COLUMNS", width)
    code, output = run("list")
    assert code == 0
    assert all(name in output for name in BUILTINS)
    assert re.search(r"truncate_older_than +amortize +Shorten", output)
    assert re.search(r"redact +forget +", output)
    assert ("max_chars (200)" in flat(output)) == (width == "160")


def test_show_explains_settings_and_gives_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy's text, settings with types and defaults, and specs that load are shown."""
    monkeypatch.setenv("COLUMNS", "120")
    code, output = run("show", "truncate_older_than")
    assert code == 0
    for part in ("mode amortize", "built into leyline", "head and a tail", "every n-th turn"):
        assert part in output
    assert re.search(r"max_chars +a whole number +200", output)
    assert re.search(r"tools +a list such as \[a;b\], or none +none", output)
    assert re.search(r"protect_last +a whole number +0 +messages at the end", output)


def test_every_example_can_be_copied() -> None:
    """The specs that are shown for each built-in policy load unchanged."""
    registry = Registry.discover()
    for name in BUILTINS:
        shown = examples(registry.get(name), registry)
        assert shown, name
        for spec in shown:
            assert load_pipeline(spec, registry)[0].name == name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("show", "truncate_older"), "did you mean 'truncate_older_than'"),
        (("try", "truncate_older", "x.json"), "did you mean 'truncate_older_than'"),
        (("try", "keep_all", "absent.json"), "cannot read absent.json"),
        (("try", "keep_all", "absent.json", "--idle", "soon"), "no duration such as 30s"),
        (("new", "Short-Pastes"), "can't be a policy's name"),
        (("new", "class"), "can't be a policy's name"),
        (("new", "redact"), "a policy is called 'redact' already"),
    ],
)
def test_mistakes_exit_with_2(arguments: tuple[str, ...], words: str) -> None:
    """An operator's mistake is reported in a line, and exits with 2."""
    code, output = run(*arguments)
    assert code == 2
    assert words in flat(output)
    assert "Traceback" not in output


def test_try_reports_and_writes(recording: Path, tmp_path: Path) -> None:
    """A trial prints its table, and writes figures and a picture on request."""
    out, picture = tmp_path / "out" / "try.json", tmp_path / "out" / "try.png"
    spec = "truncate_older_than:n=1 | drop_failed_calls"
    arguments = ("--json", str(out), "--plot", str(picture), "--turns", "--idle", "5m")
    code, output = run("try", spec, str(recording), *arguments, "--window", "9000")
    assert code == 0, output
    assert "are reclaimed" in flat(output)
    assert picture.read_bytes()[:4] == b"\x89PNG"
    told = json.loads(out.read_text())
    assert told["policy"] == spec
    assert list(told) == ["policy", "file", "total", "sessions", "rules"]
    assert told["rules"]["turns"] == told["rules"]["of"] == 39
    assert told["rules"]["broken"] == []
    assert "rules: kept on 39 of 39 turns (truncate_older_than, drop_failed_calls)" in flat(output)
    assert list(told["total"]) == [
        *("turns", "original_tokens", "sent_tokens", "reclaimed_tokens", "prefill_tokens"),
        *("policies", "faults", "fault_origins", "notes", "refused"),
    ]
    assert list(told["total"]["policies"]) == ["truncate_older_than", "drop_failed_calls"]
    assert told["total"]["turns"] == sum(len(each["by_turn"]) for each in told["sessions"]) == 39
    assert told["total"]["reclaimed_tokens"] > 0


def test_try_stops_a_policy_that_hangs(recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that doesn't end is a fault of the turn, as it is in the proxy."""

    def hangs(messages: list[dict[str, object]], turn_idx: int) -> list[dict[str, object]]:
        while True:
            pass

    policy = FunctionPolicy("hangs", "amortize", hangs)
    monkeypatch.setattr("leyline_policies.load_pipeline", lambda spec: (policy,))
    monkeypatch.setattr("leyline_lab.commands.policies_try._TIMEOUT_S", 0.05)
    code, output = run("try", "hangs", str(recording), "--limit", "2")
    assert code == 1
    assert "fault: hangs:timed_out, 2 times" in flat(output)
    assert re.search(
        rf"^  timeout\n(?:    .*\n)*    {re.escape(__file__)}:\d+ hangs$", output, re.M
    )
    assert "rules:" not in output  # they would never end


def test_try_says_where_a_policy_raises(
    recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each place is shown by type, file and line, without the error's words; the exit status is
    1."""

    def raises(messages: list[dict[str, object]], turn_idx: int) -> list[dict[str, object]]:
        raise LookupError(f"words of {messages}") if turn_idx % 2 else ValueError(str(messages))

    out = tmp_path / "try.json"
    policy = FunctionPolicy("raises", "amortize", raises)
    monkeypatch.setattr("leyline_policies.load_pipeline", lambda spec: (policy,))
    code, output = run("try", "raises", str(recording), "--limit", "4", "--json", str(out))
    assert code == 1
    for part in ("fault: raises:raised, 4 times", "ValueError", "LookupError", "rule broken"):
        assert part in output
    # One for each error; the rule that it breaks has the origin of one, which isn't printed again.
    assert len(re.findall(rf"{re.escape(__file__)}:\d+ raises", output)) == 2
    assert "You repair programs" not in output + out.read_text()
    origins = json.loads(out.read_text())["total"]["fault_origins"]["raises:raised"]
    assert [each["error"] for each in origins] == ["ValueError", "LookupError"]


def test_try_notices_a_policy_that_is_random(
    recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that fails on no turn, but rewrites what it sent before in another way each time,
    breaks a rule of the test kit, which makes the exit status 1."""
    dice = random.Random(0)

    def rolls(messages: list[Message], turn_idx: int) -> list[Message]:
        return [messages[0], edit(messages[1], name=f"n{dice.random()}"), *messages[2:]]

    out = tmp_path / "try.json"
    policy = FunctionPolicy("rolls", "amortize", rolls)
    monkeypatch.setattr("leyline_policies.load_pipeline", lambda spec: (policy,))
    code, output = run("try", "rolls", str(recording), "--json", str(out))
    assert code == 1, output
    assert "fault:" not in output
    (broken,) = json.loads(out.read_text())["rules"]["broken"]
    assert (broken["policy"], broken["rule"]) == ("rolls", "idempotent")
    assert "sessions.jsonl, line 1, turn 0, message 1" in broken["place"]
    assert "rule broken: rolls, idempotent" in output
    assert run("try", "rolls", str(recording), "--check", "0")[0] == 0


def test_limit_takes_the_first_requests(recording: Path, tmp_path: Path) -> None:
    """Only the first requests of the file are played."""
    out = tmp_path / "try.json"
    assert run("try", "keep_all", str(recording), "--limit", "5", "--json", str(out))[0] == 0
    assert json.loads(out.read_text())["total"]["turns"] == 5


def test_schema_is_printed() -> None:
    """The JSON Schema of a policies file comes on standard output, ready for a file."""
    code, output = run("schema")
    assert code == 0
    schema = json.loads(output)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert set(BUILTINS) <= set(schema["$defs"])


def test_new_package_installs_and_passes_its_own_tests(site: Path) -> None:
    """The package that ``new`` writes is found by its entry point and passes its tests."""
    plugins = ("-p", "no:cacheprovider", "-p", "no:asyncio")
    command = (sys.executable, "-m", "pytest", "-q", "-W", "error", *plugins, "tests")
    assert "3 passed" in installed(site, *command)
    shown = installed(site, LEYLINE, "policies", "show", "short_pastes")
    for part in ("leyline-short-pastes 0.1.0", "characters that stay", "short_pastes:limit=2000"):
        assert part in shown


def test_broken_plugin_hides_nobody(site: Path) -> None:
    """A plugin that fails to import is listed with its error, beside all others."""
    for width in (200, 80):
        output = installed(site, LEYLINE, "policies", "list", width=width)
        assert re.search(r"broken +broken ", output)
        assert "short_pastes" in output
        assert "truncate_older_than" in output
        assert width == 80 or "needs a newer world" in flat(output)


def test_new_package_is_short_and_sound(tmp_path: Path) -> None:
    """The written policy is short, passes the linter's rules on style, and names no other."""
    files = package_files("two_words")
    assert set(files) == {
        "pyproject.toml",
        "README.md",
        "src/two_words/__init__.py",
        "src/two_words/py.typed",
        "tests/test_two_words.py",
    }
    assert "class TwoWords:" in files["src/two_words/__init__.py"]
    assert not any("@" in text.replace("@dataclass", "") for text in files.values())
    body = files["src/two_words/__init__.py"].split("def transform", 1)[1]
    assert len(body.splitlines()) <= 10
    folder = write_package("two_words", tmp_path, Registry([]))
    style = ("--isolated", "--no-cache", "--line-length=100")
    for tool in (("check", "--select=E,F,I,B,UP,RUF"), ("format", "--check")):
        command = [str(Path(sys.executable).parent / "ruff"), *tool, *style, "."]
        result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        assert result.returncode == 0, result.stdout


def test_new_overwrites_nothing(tmp_path: Path) -> None:
    """A folder that exists, and a place that can't be written, are errors that name it."""
    (tmp_path / "mine").mkdir()
    with pytest.raises(ScaffoldError, match="mine exists already"):
        write_package("mine", tmp_path, Registry([]))
    (tmp_path / "file").write_text("")
    with pytest.raises(ScaffoldError, match="Not a directory"):
        write_package("other", tmp_path / "file", Registry([]))
    assert list((tmp_path / "mine").iterdir()) == []
