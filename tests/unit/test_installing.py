"""The install commands that users are given, and their package index."""

from __future__ import annotations

import json
import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from leyline_proxy import installing
from leyline_proxy.doctor import machine
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import EngineUnavailable, create_embedded_engine

REPOSITORY = Path(__file__).parents[2]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


class Installed:
    """A distribution that was installed from somewhere."""

    def __init__(self, told: object) -> None:
        self._told = told

    def read_text(self, name: str) -> str | None:
        """Its metadata."""
        assert name == "direct_url.json"
        return None if self._told is None else json.dumps(self._told)


@pytest.mark.parametrize("there", [True, False])
def test_a_hint_names_what_this_was_installed_from(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel or folder that is still where it was, spaces and all; else the wheel by its name, and
    never a bare name that an index would be asked for."""
    wheel = tmp_path / "my wheels" / "leyline.whl"
    wheel.parent.mkdir()
    if there:
        wheel.touch()
    told = {"url": wheel.as_uri()}
    monkeypatch.setattr(installing, "distribution", lambda _: Installed(told))
    words = shlex.split(installing.pip_install("proxy"))
    assert words[:2] == ["pip", "install"] and len(words) == 3
    by_name = r"leyline_kv-[\w.]+-py3-none-any\.whl\[proxy\]"
    assert words[2] == f"{wheel}[proxy]" if there else re.fullmatch(by_name, words[2])


@pytest.mark.parametrize(
    "told", [None, {}, [], {"url": "https://x.test/a.whl"}, {"url": "git+ssh://x"}]
)
def test_an_installation_from_elsewhere_is_named_by_its_wheel(
    told: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel names it, whatever its metadata says, or doesn't."""
    monkeypatch.setattr(installing, "distribution", lambda _: Installed(told))
    assert ".whl[proxy]" in installing.pip_install("proxy")


def test_a_source_tree_is_named_by_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any metadata there is nothing else to name."""

    def nothing(_: str) -> None:
        raise PackageNotFoundError

    monkeypatch.setattr(installing, "distribution", nothing)
    monkeypatch.setattr(installing, "version", nothing)
    assert installing.pip_install("proxy") == "pip install '.[proxy]'"


def test_pytorch_is_installed_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install commands with PyTorch name the index of the builds that aren't gigabytes of CUDA."""
    monkeypatch.setitem(sys.modules, "torch", None)
    for module in [name for name in sys.modules if name.startswith("leyline_replay")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(EngineUnavailable, match="CUDA") as refused:
        create_embedded_engine("replay", {})
    monkeypatch.setattr(machine, "package_problems", lambda *_: ["torch is missing"])
    (finding,) = machine.examine_packages(Settings())
    for told in (str(refused.value), finding.fix):
        assert f"pip install --extra-index-url {CPU_INDEX}" in told
        assert "[proxy,engine]" in told
    assert "extra-index" not in installing.pip_install("proxy")
    quick_start = (REPOSITORY / "docs" / "quick-start.md").read_text()
    (command,) = re.findall(r"^pip install .*\[proxy,engine\].*$", quick_start, re.MULTILINE)
    assert f"--extra-index-url {CPU_INDEX}" in command


def test_nobody_is_told_to_fetch_what_is_on_no_index() -> None:
    """Neither code nor pages have pip look for Leyline by its name, which anybody may take."""
    pages = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]
    code = [
        path
        for folder in ("proxy", "policies", "engine_patch")
        for path in (REPOSITORY / folder).rglob("*.py")
    ]
    assert len(pages) > 30 and len(code) > 300
    for path in (*pages, *code):
        text = path.read_text(encoding="utf-8")
        if path.name == "CHANGELOG.md":
            continue
        assert "leyline-kv[" not in text, path
        assert not re.search(r"pip install[^\n]*leyline-kv", text), path
        assert "pypi.org/project/leyline" not in text, path
