"""The import-linter contracts hold, and would notice a forbidden import."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = {
    "leyline_proxy": REPOSITORY / "proxy" / "leyline_proxy",
    "leyline_policies": REPOSITORY / "policies" / "leyline_policies",
    "leyline_engine": REPOSITORY / "engine_patch" / "leyline_engine",
    "leyline_replay": REPOSITORY / "engine_patch" / "leyline_replay",
    "leyline_lab": REPOSITORY / "bench" / "leyline_lab",
}

# Imports every module of a package while some distributions can't be imported, as if the extra
# that brings them had not been installed. What only plugins need is tested where their engines are.
IMPORT_WITHOUT = """
import importlib, pkgutil, sys

package, *absent = sys.argv[1:]

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"{name} is not installed", name=name)

sys.meta_path.insert(0, Absent())
root = importlib.import_module(package)
for module in pkgutil.walk_packages(root.__path__, package + "."):
    of_plugins = (".sglang.", ".vllm.", "leyline_engine.server.", ".rows.kernel", "scheduler.")
    if not module.name.endswith(".__main__") and not any(p in module.name for p in of_plugins):
        importlib.import_module(module.name)
"""


def _lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the packages below ``folder`` under the project's contracts."""
    return subprocess.run(
        [
            str(Path(sys.executable).with_name("lint-imports")),
            "--no-cache",
            "--config",
            str(REPOSITORY / "pyproject.toml"),
        ],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def copied(folder: Path) -> Path:
    """Copy the packages to a folder where a test may spoil them."""
    for name, path in PACKAGES.items():
        shutil.copytree(
            path, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors")
        )
    return folder


def test_contracts_hold(tmp_path: Path) -> None:
    """The code keeps every contract in pyproject.toml."""
    result = _lint(copied(tmp_path))
    assert result.returncode == 0, result.stdout
    assert "0 broken" in result.stdout


VIOLATIONS = {
    "leyline_proxy.model": ("httpx", "What decides a turn is pure"),
    "leyline_proxy": ("leyline_engine.admit.plan", "sees of the engine only its contract"),
    "leyline_policies": ("leyline_engine", "Policies know neither"),
    "leyline_engine": ("leyline_proxy", "never imports the proxy"),
    "leyline_engine.contract": ("torch", "The wire contract is plain Python"),
    "leyline_engine.records.ledger": ("torch", "but for the rotation, is pure Python"),
    "leyline_engine.admit.plan": ("leyline_engine.sglang", "knows neither engine"),
    "leyline_engine.sglang": ("leyline_replay", "know nothing of each other"),
    "leyline_proxy.apis.anthropic": ("httpx", "Mappings of other APIs"),
    "leyline_engine.claims.book": ("torch", "Claims are pure"),
    "leyline_lab.claims.reader": ("leyline_engine.claims.book", "shares nothing with book"),
    "leyline_lab.reuse.verbatim_runs": ("leyline_engine.reuse", "The ceiling of reuse"),
    "leyline_replay.engine": ("leyline_lab.claims", "doesn't know the laboratory"),
    "leyline_proxy.http": ("leyline_lab.replay", "Nothing that serves imports"),
    "leyline_proxy.audit.chain": ("threading", "Audit records"),
    "leyline_proxy.admission.fair_queue": ("asyncio", "Who is let in next"),
}
"""Imports that are forbidden, by module, and a part of the contract's name."""


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The report's sections on broken contracts by their headings, with every violation in."""
    folder = copied(tmp_path_factory.mktemp("spoilt"))
    for module, (imported, _) in VIOLATIONS.items():
        path = folder / module.replace(".", "/")
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        path.write_text(f"{path.read_text()}\nimport {imported}\n")
    result = _lint(folder)
    assert result.returncode == 1, result.stdout
    report = result.stdout.partition("Broken contracts")[2]
    parts = re.split(r"\n([^\n]+(?:\n[^\n]+)?)\n-{5,}\n", report)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("module", VIOLATIONS)
def test_violations_are_caught(module: str, broken: dict[str, str]) -> None:
    """The report on a contract names each import that breaks it."""
    imported, contract = VIOLATIONS[module]
    (section,) = (text for heading, text in broken.items() if contract in heading)
    assert re.search(rf"{re.escape(module)} -> {re.escape(imported)}\b", section), section


@pytest.mark.parametrize(
    ("package", "absent"),
    [
        ("leyline_proxy", ["torch", "transformers", "safetensors", "numpy", "openai"]),
        ("leyline_engine", ["fastapi", "httpx", "redis", "rapidfuzz", "pydantic_settings"]),
        ("leyline_policies", ["torch", "transformers", "fastapi", "starlette", "httpx", "redis"]),
        ("leyline_replay", ["fastapi", "httpx", "redis", "rapidfuzz", "leyline_proxy"]),
    ],
    ids=["proxy", "engine", "policies", "replay"],
)
def test_packages_load_without_each_others_extras(package: str, absent: list[str]) -> None:
    """Each package imports with nothing installed but its own extra."""
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_WITHOUT, package, *absent],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
