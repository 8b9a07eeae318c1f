"""The images' own commands, run in a folder: what is installed starts, answers and is healthy."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.image_build import ImageFolder, Stage, stages_of
from support.redis_server import free_port

pytestmark = pytest.mark.nightly

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
MODEL = REPOSITORY / "engine_patch/leyline_replay/models/trained/plain"
BASE = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
SGLANG_SITE = (
    REPOSITORY / ".venv-sglang/lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
)
# As in `make sglang`: SGLang sizes its pool for a GPU otherwise.
OTHERS = ("leyline_replay", "leyline_lab")
SMALL = ("--max-total-tokens", "16384", "--max-running-requests", "8", "--dtype", "float32")
START_S = 600.0


def _build(folder: Path, name: str) -> tuple[ImageFolder, Stage]:
    # An empty index: PyTorch comes from wherever this machine has its packages from.
    image = ImageFolder(folder, REPOSITORY, BASE, {"TORCH_INDEX": folder.as_uri()})
    return image, image.build(stages_of(DEPLOY / name))


@contextmanager
def _started(
    image: ImageFolder, stage: Stage, command: list[str], **settings: str
) -> Iterator[subprocess.Popen[bytes]]:
    """ENTRYPOINT and ``command``, until the block ends; its output is in the image's folder."""
    environment = image.environment(stage) | settings
    words = image.command([*stage.last("ENTRYPOINT"), *command])
    with (image.root / "output").open("wb") as output:
        process = subprocess.Popen(
            ["/usr/bin/env", *words], env=environment, stdout=output, stderr=output, cwd=image.root
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(30)


def _is_healthy(image: ImageFolder, stage: Stage, port: int) -> bool:
    """Return the result of HEALTHCHECK, on another port than the image's."""
    words = [
        word.replace(":8790/", f":{port}/").replace(":30000/", f":{port}/")
        for word in image.command(_health_command(stage))
    ]
    done = subprocess.run(
        ["/usr/bin/env", *words], env=image.environment(stage), capture_output=True, check=False
    )
    return done.returncode == 0


def _health_command(stage: Stage) -> list[str]:
    _, _, command = stage.of("HEALTHCHECK")[-1].value.partition("CMD ")
    words: list[str] = json.loads(command)
    return words


def _wait_healthy(
    image: ImageFolder, stage: Stage, port: int, process: subprocess.Popen[bytes]
) -> None:
    until = time.monotonic() + START_S
    while not _is_healthy(image, stage, port):
        output = (image.root / "output").read_text(errors="replace")
        assert process.poll() is None, output[-4000:]
        assert time.monotonic() < until, output[-4000:]
        time.sleep(0.5)


def _get(url: str, body: Mapping[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
            return json.load(response)
    except urllib.error.HTTPError as error:
        return json.load(error) | {"status": error.code}


def _answers(port: int) -> bool:
    """Return True if a chat is answered; fail with the answer if it is an error."""
    body = {
        "model": "leyline-recall",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4,
    }
    answer = _get(f"http://127.0.0.1:{port}/v1/chat/completions", body)
    assert "choices" in answer, answer
    return bool(answer["choices"][0]["message"]["content"])


def _has(image: ImageFolder, stage: Stage, module: str) -> bool:
    search = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    done = subprocess.run(
        ["/usr/bin/env", "python3", "-P", "-c", search],
        env=image.environment(stage),
        cwd=image.root,
        check=False,
    )
    return done.returncode == 0


def _settings(port: int, **more: str) -> dict[str, str]:
    return {"LEYLINE_HOST": "127.0.0.1", "LEYLINE_PORT": str(port), **more}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder for images; together they take gigabytes, so none is kept."""
    root = tmp_path_factory.mktemp("images")
    yield root
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def slim(folders: Path) -> tuple[ImageFolder, Stage]:
    """The proxy's image."""
    return _build(folders / "proxy", "Dockerfile.proxy")


@pytest.fixture(scope="module")
def sglang(folders: Path) -> tuple[ImageFolder, Stage]:
    """SGLang's image; in place of its base image, SGLang for CPUs."""
    root = folders / "sglang"
    image = ImageFolder(root, REPOSITORY, BASE)
    build, final = stages_of(DEPLOY / "Dockerfile.sglang")
    image.build([build])
    site = root / "base-image"
    site.mkdir()
    for entry in SGLANG_SITE.iterdir():
        if "leyline" not in entry.name and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)
    (own,) = (root / "usr/local/lib").glob("python*/site-packages")
    stubs = DEPLOY / "sglang" / "stubs"
    (own / "base-image.pth").write_text(f"{site}\n{stubs}\n")
    return image, image.build([final])


def test_proxy_image_has_no_engine(slim: tuple[ImageFolder, Stage]) -> None:
    """The proxy's image holds the proxy and its detectors, but no PyTorch and no transformers,
    neither the replay engine nor the laboratory."""
    image, stage = slim
    present, absent = ("leyline_proxy", "phonenumbers"), ("torch", "transformers", *OTHERS)
    found = {name for name in (*present, *absent) if _has(image, stage, name)}
    assert found == set(present)


def test_proxy_image_lives_without_its_engine(slim: tuple[ImageFolder, Stage]) -> None:
    """With no engine in reach the proxy's container is healthy, and says that it isn't ready."""
    image, stage = slim
    port, nobody = free_port(), free_port()
    settings = _settings(port, LEYLINE_UPSTREAM=f"http://127.0.0.1:{nobody}")
    assert not _is_healthy(image, stage, port)
    with _started(image, stage, stage.last("CMD"), **settings) as process:
        _wait_healthy(image, stage, port, process)
        readiness = _get(f"http://127.0.0.1:{port}/readyz")
        assert (readiness["status"], readiness["ready"]) == (503, False)


def test_cpu_image_answers(folders: Path) -> None:
    """The image with the embedded engine starts by itself, becomes healthy and answers a chat."""
    image, stage = _build(folders / "cpu", "Dockerfile")
    port = free_port()
    with _started(image, stage, stage.last("CMD"), **_settings(port)) as process:
        _wait_healthy(image, stage, port, process)
        assert _answers(port)
        assert _get(f"http://127.0.0.1:{port}/readyz")["upstreams"][0]["splices"] is True
    assert [name for name in OTHERS if _has(image, stage, name)] == ["leyline_replay"]


def test_sglang_image_splices_behind_the_proxy_image(
    slim: tuple[ImageFolder, Stage], sglang: tuple[ImageFolder, Stage]
) -> None:
    """SGLang's image, by its own command line, is an engine that the proxy's image splices on."""
    image, stage = sglang
    assert not [name for name in OTHERS if _has(image, stage, name)]
    engine_port, port = free_port(), free_port()
    flags = ["--model-path", str(MODEL), "--served-model-name", "leyline-recall"]
    # The last of two equal flags counts.
    flags += [*SMALL, "--host", "127.0.0.1", "--port", str(engine_port)]
    settings = _settings(port, LEYLINE_UPSTREAM=f"http://127.0.0.1:{engine_port}")
    with _started(image, stage, flags, OMP_NUM_THREADS="1") as engine:
        _wait_healthy(image, stage, engine_port, engine)
        proxy, final = slim
        with _started(proxy, final, final.last("CMD"), **settings) as process:
            _wait_healthy(proxy, final, port, process)
            assert _answers(port)
            (upstream,) = _get(f"http://127.0.0.1:{port}/readyz")["upstreams"]
            assert upstream["engine"] == "sglang"
            assert upstream["splices"] is True
