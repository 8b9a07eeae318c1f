"""Commands of other distributions: found by entry point, named if missing, harmless if broken."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints

import pytest
import typer
from typer.testing import CliRunner, Result

from leyline_proxy.cli import build_app, laboratory
from leyline_proxy.cli.laboratory import COMMANDS, POLICY_COMMANDS
from leyline_proxy.installing import pip_install

# Long lines of the help are cut to the terminal's width.
WIDE = {"COLUMNS": "200", "TERMINAL_WIDTH": "200"}


def greet(app: typer.Typer) -> None:
    """Add a command of somebody else's."""

    @app.command("greet")
    def command(name: str) -> None:
        """Greet somebody."""
        typer.echo(f"Hello, {name}.")


def stop(app: typer.Typer) -> None:
    """Fail while the command is added."""
    raise RuntimeError("out of order")


def run(*words: str) -> Result:
    """Run ``leyline`` with the entry points that are installed now."""
    return CliRunner().invoke(build_app(), words, env=WIDE)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """Entry points that stand for those of the installed distributions; none at first."""
    points: list[EntryPoint] = []
    monkeypatch.setattr(
        laboratory, "entry_points", lambda group: EntryPoints(points).select(group=group)
    )
    yield points


def test_the_laboratory_has_every_command_that_a_hint_stands_for() -> None:
    """With it installed, each is a command of its own, and the frame adds no other."""
    for group, words in ((COMMANDS, ()), (POLICY_COMMANDS, ("policies",))):
        points = laboratory.entry_points(group=group.entry_points)
        assert {point.name for point in points} == set(group.help)
        for name in group.help:
            shown = run(*words, name, "--help")
            assert shown.exit_code == 0, shown.output
            assert "laboratory. Install" not in shown.output


@pytest.mark.usefixtures("installed")
def test_a_missing_command_names_the_laboratory_and_its_installation() -> None:
    """Every command of it does, whatever follows its name, and ends with 2; help lists them all."""
    listed = " ".join(run("--help").output.split())
    for name, text in COMMANDS.help.items():
        assert f"{name} {text} (not installed)" in listed.replace("│ │ ", "")
        for rest in ([], ["--help"], ["reuse", "--limit", "3", "-x"]):
            refused = run(name, *rest)
            assert refused.exit_code == 2
            assert refused.stderr.startswith(f"leyline {name}: It is in the laboratory.")
            assert pip_install("lab") in refused.stderr
    refused = run("policies", "try", "truncate_older_than:n=4", "a.jsonl")
    assert refused.exit_code == 2 and pip_install("lab") in refused.stderr
    assert run("policies", "list").exit_code == 0


def test_a_command_of_another_distribution_is_added(installed: list[EntryPoint]) -> None:
    """Its entry point is enough."""
    installed.append(EntryPoint("greet", f"{__name__}:greet", COMMANDS.entry_points))
    assert run("greet", "Ada").output == "Hello, Ada.\n"
    assert "Greet somebody." in run("--help").output


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("no_such_module:register", "ModuleNotFoundError: No module named 'no_such_module'"),
        (f"{__name__}:nothing", "AttributeError: "),
        (f"{__name__}:stop", "RuntimeError: out of order"),
    ],
)
def test_a_broken_command_stops_no_other(
    value: str, said: str, installed: list[EntryPoint]
) -> None:
    """`leyline serve` starts as ever; the broken command names its entry point and the error."""
    installed.append(EntryPoint("demo", value, COMMANDS.entry_points))
    assert run("serve", "--help").exit_code == 0
    assert "Broken." in run("--help").output
    broken = run("demo", "--limit", "1")
    assert broken.exit_code == 2
    assert broken.stderr.startswith(f"leyline demo: {value} doesn't load: {said}")


@pytest.mark.parametrize("words", [["--help"], ["serve", "--help"]])
def test_help_loads_no_library_that_it_does_not_need(words: list[str]) -> None:
    """Neither tensors nor web servers, nor what measures and draws."""
    heavy = ("torch", "transformers", "numpy", "matplotlib", "openai", "httpx", "fastapi")
    heavy += ("pydantic_settings",)
    program = (
        "import sys\n"
        "from leyline_proxy.cli import main\n"
        "try:\n    main()\n"
        f"finally:\n    print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, *words], capture_output=True, text=True, check=True
    )
    assert "serve" in done.stdout
    assert done.stderr.splitlines()[-1] == "[]"


def test_a_missing_package_of_the_proxy_is_named() -> None:
    """Where the extra isn't installed, `leyline serve` ends with 2 and the command that installs
    it; a missing package that isn't the proxy's is a defect, and keeps its traceback."""
    program = (
        "import sys\n"
        "from leyline_proxy.cli import main as frame\n"
        "sys.modules['pydantic_settings'] = None\n"
        "{patch}"
        "frame()"
    )
    missing = "import leyline_proxy.installing as i\ni.package_problems = lambda *_: ['it']\n"
    ended = _python(program.format(patch=missing))
    assert ended.returncode == 2
    said = "leyline: the package 'pydantic_settings' is missing. Install it with: "
    assert ended.stderr == f"{said}{pip_install('proxy')}\n"
    defect = _python(program.format(patch=""))
    assert defect.returncode == 1 and "ModuleNotFoundError" in defect.stderr


def _python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", program, "serve"], capture_output=True, text=True, check=False
    )
