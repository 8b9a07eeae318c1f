"""The install commands that users are given, and their package index."""

from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from leyline_proxy import installing
from leyline_proxy.doctor import machine
from leyline_proxy.doctor.findings import Status
from leyline_proxy.settings import Settings
from leyline_proxy.upstream import embedded
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


@pytest.mark.parametrize("beside", [True, False])
def test_a_hint_names_the_other_wheels_beside_this_one(
    beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engine and laboratory are wheels in the same folder, or are called by their wheels' names; an
    index has neither, so no extra stands for them."""
    own = tmp_path / installing._wheel("leyline-kv")
    others = [tmp_path / installing._wheel(name) for name in ("leyline-replay", "leyline-lab")]
    for wheel in (own, *(others if beside else ())):
        wheel.touch()
    monkeypatch.setattr(installing, "distribution", lambda _: Installed({"url": own.as_uri()}))
    engine, lab = (str(wheel) if beside else wheel.name for wheel in others)
    prefix = f"pip install --extra-index-url {CPU_INDEX}"
    assert installing.pip_install("proxy", "engine") == f"{prefix} '{own}[proxy]' {engine}"
    assert installing.pip_install("lab") == f"pip install {lab}"


def test_a_hint_in_a_checkout_names_the_folders_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are the folders that hold the other distributions' pyproject.toml."""
    told = Installed({"url": REPOSITORY.as_uri(), "dir_info": {"editable": True}})
    monkeypatch.setattr(installing, "distribution", lambda _: told)
    for extra, name in (("engine", "leyline-replay"), ("lab", "leyline-lab")):
        folder = Path(shlex.split(installing.pip_install(extra))[-1])
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert project["name"] == name


@pytest.mark.parametrize(
    "told", [None, {}, [], {"url": "https://x.test/a.whl"}, {"url": "git+ssh://x"}]
)
def test_an_installation_from_elsewhere_is_named_by_its_wheel(
    told: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel names it, whatever its metadata says, or doesn't."""
    monkeypatch.setattr(installing, "distribution", lambda _: Installed(told))
    assert ".whl[proxy]" in installing.pip_install("proxy")
    assert re.fullmatch(
        r"pip install leyline_lab-[\w.]+-py3-none-any\.whl", installing.pip_install("lab")
    )


def test_a_source_tree_is_named_by_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any metadata there is nothing else to name, and Leyline itself isn't installed."""

    def nothing(_: str) -> None:
        raise PackageNotFoundError

    monkeypatch.setattr(installing, "distribution", nothing)
    monkeypatch.setattr(installing, "version", nothing)
    assert installing.pip_install("proxy") == "pip install '.[proxy]'"
    assert installing.pip_install("proxy", "lab") == "pip install '.[proxy]' ./bench"
    assert installing.pip_install("lab") == "pip install . ./bench"


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
        assert installing.pip_install("proxy", "engine") in told
    assert "extra-index" not in installing.pip_install("proxy", "lab")
    quick_start = (REPOSITORY / "docs" / "quick-start.md").read_text()
    (command,) = re.findall(r"^pip install .*\[proxy\]' \\\n.*leyline_replay.*$", quick_start, re.M)
    assert f"--extra-index-url {CPU_INDEX}" in command


def test_an_engine_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its distribution there is no entry point: the message has its name and the command
    that installs it, and the doctor finds that the engine is missing, or what it needs."""
    monkeypatch.setattr(embedded, "entry_points", lambda **_: ())
    with pytest.raises(EngineUnavailable, match="leyline-replay") as refused:
        create_embedded_engine("replay", {})
    assert installing.pip_install("proxy", "engine") in str(refused.value)
    with pytest.raises(EngineUnavailable, match="There is no engine 'reply'"):
        create_embedded_engine("reply", {})
    needed = {"leyline-kv": ["nobody-s-engine; extra == 'engine'"], "leyline-replay": ["no-torch"]}
    monkeypatch.setattr(installing, "requires", needed.__getitem__)
    (finding,) = machine.examine_packages(Settings())
    assert "nobody-s-engine is missing; no-torch is missing" in finding.detail
    (finding,) = machine.examine_packages(Settings(upstream="http://127.0.0.1:1"))
    assert finding.status is Status.OK


def test_nobody_is_told_to_fetch_what_is_on_no_index() -> None:
    """Neither code nor pages have pip look for Leyline by its name, which anybody may take."""
    pages = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]
    code = [
        path
        for folder in ("proxy", "policies", "engine_patch", "bench")
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
