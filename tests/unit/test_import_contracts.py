"""The import-linter contracts hold, and would notice a forbidden import."""

from __future__ import annotations

import os
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
    of_plugins = (".sglang.", ".lab.sglang_", ".vllm.", "leyline_engine.server.", ".rows.kernel")
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


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of the three packages that a test may spoil."""
    for name, path in PACKAGES.items():
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(path, tmp_path / name, ignore=ignore)
    return tmp_path


def test_contracts_hold(sources: Path) -> None:
    """The code keeps every contract in pyproject.toml."""
    result = _lint(sources)
    assert result.returncode == 0, result.stdout
    assert "0 broken" in result.stdout


@pytest.mark.parametrize(
    ("module", "statement", "contract"),
    [
        ("leyline_proxy/model/__init__.py", "import httpx", "decides a turn is pure"),
        ("leyline_proxy/__init__.py", "import leyline_engine.admit.plan", "only its contract"),
        ("leyline_policies/__init__.py", "import leyline_engine", "Policies know neither"),
        ("leyline_engine/__init__.py", "import leyline_proxy", "never imports the proxy"),
        ("leyline_engine/contract/__init__.py", "import torch", "pure Python"),
        ("leyline_engine/admit/plan.py", "import leyline_engine.sglang", "knows neither engine"),
        ("leyline_engine/sglang/__init__.py", "import leyline_replay", "of each other"),
        ("leyline_proxy/apis/anthropic/__init__.py", "import httpx", "Mappings of other APIs"),
        ("leyline_engine/claims/book.py", "import torch", "Claims are pure"),
        ("leyline_lab/claims/reader.py", "import leyline_engine.claims.book", "shares nothing"),
        ("leyline_lab/reuse/verbatim_runs.py", "import leyline_engine.reuse", "ceiling of"),
        ("leyline_replay/engine.py", "import leyline_lab.claims", "the laboratory"),
        ("leyline_lab/demo/run.py", "import leyline_lab.recording", "the laboratory"),
        ("leyline_proxy/audit/chain.py", "import threading", "Audit records"),
        ("leyline_proxy/admission/fair_queue.py", "import asyncio", "let in next"),
    ],
    ids=[
        "model",
        "proxy",
        "policies",
        "engine",
        "contract",
        "shared",
        "sglang",
        "mappings",
        "claims",
        "reader",
        "ceiling",
        "lab",
        "recording",
        "audit",
        "admission",
    ],
)
def test_violations_are_caught(sources: Path, module: str, statement: str, contract: str) -> None:
    """One forbidden import breaks the contract that forbids it."""
    path = sources / module
    path.write_text(f"{path.read_text()}\n{statement}\n")
    result = _lint(sources)
    assert result.returncode == 1, result.stdout
    broken = [line for line in result.stdout.splitlines() if " BROKEN" in line]
    assert any(contract in line for line in broken), result.stdout


@pytest.mark.parametrize(
    ("package", "absent"),
    [
        ("leyline_proxy", ["torch", "transformers", "safetensors", "numpy", "openai"]),
        ("leyline_engine", ["fastapi", "httpx", "redis", "rapidfuzz", "pydantic_settings"]),
        ("leyline_policies", ["torch", "transformers", "fastapi", "starlette", "httpx", "redis"]),
    ],
    ids=["proxy", "engine", "policies"],
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
