"""A separately installed package can offer policies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PYPROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "leyline-test-plugin"
version = "1.2.3"

[project.entry-points."leyline.policies"]
shout = "shouting:Shout"
whisper = "shouting:whisper"
broken = "shouting_broken:Anything"
keep_all = "shouting:Shout"

[tool.setuptools]
py-modules = ["shouting", "shouting_broken"]
"""

SHOUTING = """\
from __future__ import annotations

from leyline_policies import map_text


class Shout:
    name = "shout"
    mode = "amortize"

    def __init__(self, times: int = 1, roles: list[str] | None = None) -> None:
        self.times, self.roles = times, roles

    def transform(self, messages, turn_idx):
        return [
            map_text(m, lambda text: text.upper() + "!" * self.times)
            if m["role"] in (self.roles or [m["role"]])
            else m
            for m in messages
        ]


def whisper(messages, turn_idx, *, dots: int = 3):
    return [map_text(m, lambda text: text.lower() + "." * dots) for m in messages]
"""

BROKEN = "raise RuntimeError('needs a newer world')\n"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip installed the plugin."""
    source = tmp_path_factory.mktemp("plugin")
    target = tmp_path_factory.mktemp("site")
    (source / "pyproject.toml").write_text(PYPROJECT)
    (source / "shouting.py").write_text(SHOUTING)
    (source / "shouting_broken.py").write_text(BROKEN)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-index", "--no-deps", "--no-build-isolation", "--target", str(target)]
    result = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return target


def _python(installed: Path, code: str) -> str:
    """Return the output of ``code`` in a fresh interpreter that sees the plugin."""
    result = subprocess.run(
        [sys.executable, "-c", f"import sys\nfrom leyline_policies import *\n{code}"],
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_installed_policies_are_found(installed: Path) -> None:
    """A class and a function from another package are loaded by name, with typed settings."""
    code = (
        "spec = 'shout:times=2,roles=[user] | whisper:dots=1'\n"
        "messages = [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Yo'}]\n"
        "for policy in load_pipeline(spec):\n"
        "    messages = policy.transform(messages, 0)\n"
        "print([m['content'] for m in messages])"
    )
    assert _python(installed, code) == "['hi!!.', 'yo.']"


def test_plugin_is_imported_only_when_asked_for(installed: Path) -> None:
    """Loading built-in policies and listing names imports no plugin."""
    code = (
        "load_pipeline('truncate_older_than')\n"
        "names = Registry.discover().names()\n"
        "print('shout' in names, 'broken' in names, 'shouting' in sys.modules)"
    )
    assert _python(installed, code) == "True True False"


@pytest.mark.parametrize(
    ("ask", "error", "fragments"),
    [
        (
            "load_pipeline('broken')",
            "PluginError",
            ["leyline-test-plugin 1.2.3", "broken = shouting_broken:Anything", "a newer world"],
        ),
        ("Registry.discover().all()", "PluginError", ["leyline-test-plugin 1.2.3", "broken"]),
        (
            "load_pipeline('keep_all')",
            "NameClashError",
            ["built into leyline", "leyline-test-plugin 1.2.3", "keep_all = shouting:Shout"],
        ),
        ("load_pipeline('shuot')", "UnknownPolicyError", ["did you mean 'shout'"]),
        (
            "load_pipeline('shout:times=x')",
            "SettingError",
            ["shout: times='x' is not a whole number"],
        ),
    ],
)
def test_trouble_is_named(installed: Path, ask: str, error: str, fragments: list[str]) -> None:
    """A broken plugin, a name claimed twice and a misspelt name each say what to look at."""
    code = f"try:\n    {ask}\nexcept PolicyError as e:\n    print(type(e).__name__, e)"
    output = _python(installed, code)
    assert output.startswith(error)
    for fragment in fragments:
        assert fragment in output
