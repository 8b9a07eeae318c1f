"""Each distribution alone in a fresh environment: it installs, runs, and says what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

import httpx
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.redis_server import free_port
from support.waiting import wait

sys.path.insert(0, str(Path(__file__).parents[2] / "deploy" / "release"))

import release

pytestmark = pytest.mark.nightly

REPOSITORY = Path(__file__).parents[2]
START_S = 120.0


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment with wheels of this project, and only what they require."""

    root: Path
    wheels: dict[str, Path]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment in an empty folder, as a user would."""
        return subprocess.run(
            self.command(*words),
            cwd=self.root,
            env=self.variables(),
            capture_output=True,
            text=True,
            check=False,
        )

    def command(self, program: str, *words: str) -> list[str]:
        """A command line whose program is the environment's."""
        return [str(self.root / "bin" / program), *words]

    def variables(self) -> dict[str, str]:
        """This process's variables, but for those that change where and how Leyline runs."""
        own = {name: value for name, value in os.environ.items() if not _is_ours(name)}
        return own | {"COLUMNS": "200"}

    def refused(self, *words: str) -> str:
        """The message of a command that ends with 2, without a traceback."""
        ended = self.run(*words)
        assert ended.returncode == 2, ended.stdout + ended.stderr
        assert "Traceback" not in ended.stderr
        return " ".join(ended.stderr.split())


def _is_ours(name: str) -> bool:
    return name == "PYTHONPATH" or name.startswith("LEYLINE_")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels of the last commit, by distribution."""
    out = tmp_path_factory.mktemp("dist")
    made = release.release(REPOSITORY, out)
    files = [path for path in made if path.suffix == ".whl"]
    return {path.name.partition("-")[0].replace("_", "-"): path for path in files}


@pytest.fixture
def bare(tmp_path: Path, wheels: dict[str, Path]) -> Environment:
    """An environment with nothing in it."""
    root = tmp_path / "environment"
    venv.create(root, with_pip=False, symlinks=True)
    return Environment(root, wheels)


def install(into: Environment, *wanted: str) -> None:
    """Install distributions of this project, such as ``leyline-kv[proxy]``, by pip, offline.

    What they require is linked from the environment of the tests first, by the wheels' own
    metadata, so pip finds a requirement only if a wheel declares it.
    """
    requirements = [Requirement(each) for each in wanted]
    site = next((into.root / "lib").glob("python*/site-packages"))
    for found in _closure(requirements).values():
        if canonicalize_name(found.metadata["Name"]) not in into.wheels:
            _link(found, site)
    files = [
        str(into.wheels[each.name]) + (f"[{','.join(each.extras)}]" if each.extras else "")
        for each in requirements
    ]
    pip = [sys.executable, "-P", "-m", "pip", "--python", str(into.root / "bin" / "python")]
    options = ["--no-index", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "install", *options, *files],
        env={name: value for name, value in into.variables().items() if name[:4] != "PIP_"}
        | {"PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _closure(requirements: list[Requirement]) -> dict[str, Distribution]:
    """The distributions that are required, directly or not, as this environment has them."""
    found: dict[str, Distribution] = {}
    visited = set[str]()
    left = list(requirements)
    while left:
        wanted = left.pop()
        if str(wanted) in visited:
            continue
        visited.add(str(wanted))
        package = distribution(wanted.name)
        found[canonicalize_name(wanted.name)] = package
        for each in map(Requirement, package.requires or ()):
            marker = each.marker
            if marker is None or any(
                marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras)
            ):
                left.append(each)
    return found


def _link(package: Distribution, site: Path) -> None:
    tops = {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}
    assert tops, package.metadata["Name"]
    for top in tops:
        if not (site / top).exists():
            (site / top).symlink_to(Path(str(package.locate_file(top))).resolve())


def test_the_main_distribution_alone(bare: Environment) -> None:
    """Help and catalogue work without any extra; what needs one, another distribution or an engine
    names it and the command that installs it, by the wheels in the folder that it came from."""
    install(bare, "leyline-kv")
    assert "serve" in bare.run("leyline", "--help").stdout
    assert bare.run("leyline", "serve", "--help").returncode == 0
    assert "truncate_older_than" in bare.run("leyline", "policies", "list").stdout
    proxy = f"pip install '{bare.wheels['leyline-kv']}[proxy]'"
    for command in (["serve"], ["doctor"], ["keys", "new", "red"]):
        assert proxy in bare.refused("leyline", *command), command
    lab = f"pip install {bare.wheels['leyline-lab']}"
    for command in (["demo"], ["bench", "reuse", "--help"], ["policies", "try", "a", "b"]):
        said = bare.refused("leyline", *command)
        assert "It is in the laboratory." in said and lab in said, command


def test_the_proxy_without_its_engine(bare: Environment) -> None:
    """It serves engines elsewhere; without one it names the distribution of the embedded engine."""
    install(bare, "leyline-kv[proxy]")
    said = bare.refused("leyline", "serve", "--port", "0")
    assert "leyline-replay" in said and str(bare.wheels["leyline-replay"]) in said
    port, nobody = free_port(), free_port()
    with _serving(bare, port, "--upstream", f"http://127.0.0.1:{nobody}"):
        assert httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 503


def test_the_replay_engine_with_the_proxy(bare: Environment) -> None:
    """`leyline serve` answers a chat with a model that ships."""
    install(bare, "leyline-kv[proxy]", "leyline-replay")
    port = free_port()
    with _serving(bare, port):
        assert _chat(f"http://127.0.0.1:{port}")


def test_the_replay_engine_alone(bare: Environment) -> None:
    """Without the proxy's extra it is an engine that other programs start."""
    install(bare, "leyline-kv", "leyline-replay")
    program = (
        "from importlib.metadata import entry_points\n"
        "(point,) = entry_points(group='leyline.engines')\n"
        "print(type(point.load()()).__name__)"
    )
    started = bare.run("python", "-P", "-c", program)
    assert (started.returncode, started.stdout) == (0, "Starlette\n"), started.stderr


def test_the_laboratory_without_an_engine(bare: Environment, tmp_path: Path) -> None:
    """What needs no engine works; what does names the distribution that has one."""
    install(bare, "leyline-kv", "leyline-lab")
    assert bare.run("leyline", "demo", "--help").returncode == 0
    trial = bare.run("leyline", "policies", "try", "truncate_older_than:n=2", "--help")
    assert trial.returncode == 0, trial.stderr
    engine = str(bare.wheels["leyline-replay"])
    for command in (["demo"], ["bench", "reuse"], ["bench", "splice-kernel"]):
        said = bare.refused("leyline", *command)
        assert "leyline_replay" in said and engine in said, command


@contextmanager
def _serving(where: Environment, port: int, *flags: str) -> Iterator[None]:
    """``leyline serve`` on a port, from when it is alive until the block ends."""
    log = where.root / "serve.log"
    command = where.command("leyline", "serve", "--port", str(port), *flags)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=where.root, env=where.variables(), stdout=output, stderr=output
        )
        try:
            wait(lambda: _is_alive(port) or process.poll() is not None, START_S)
            assert process.poll() is None, log.read_text(errors="replace")
            yield
        finally:
            process.terminate()
            process.wait(30)


def _is_alive(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _chat(url: str) -> str:
    body = {
        "model": "leyline-recall",
        "messages": [{"role": "user", "content": "Hello."}],
        "max_tokens": 4,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    document: dict[str, Any] = answer.raise_for_status().json()
    content: str = document["choices"][0]["message"]["content"]
    return content
