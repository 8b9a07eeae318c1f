"""Servers that the tests of the SGLang plugin share; each starts with the first test that asks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Lock

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
sys.path.insert(1, str(Path(__file__).parent.parent / "oracle" / "support"))

from equality_kit import PlayedSession, load_reference
from oracle_models import OracleModel
from pool_probe import probe_environment
from sglang_models import SglangModel, build_sglang_model
from sglang_server import SglangServer, free_port

try:
    version("sglang")
except PackageNotFoundError:
    # SGLang has an environment of its own, made by `make sglang-setup`.
    collect_ignore_glob = ["*"]

# What importing SGLang warns of on a machine without a GPU; every other warning is an error.
_OF_SGLANG = (
    "ignore:MultiPlatformOp is deprecated:DeprecationWarning",
    "ignore:Only CUDA.* support (AWQ|GGUF quantization) currently:UserWarning",
    "ignore:Triton is not supported on current platform:UserWarning",
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",
    "ignore:builtin type (SwigPyPacked|SwigPyObject|swigvarlink) has no:DeprecationWarning",
)

ModelFolder = Callable[[SglangModel], Path]
StartServer = Callable[..., SglangServer]


def pytest_configure(config: pytest.Config) -> None:
    """Let SGLang be imported."""
    for rule in _OF_SGLANG:
        config.addinivalue_line("filterwarnings", rule)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """Folders of tiny random models, each built once."""
    parent = tmp_path_factory.mktemp("models")
    return lambda model: build_sglang_model(model, parent / model.value)


@pytest.fixture(scope="module")
def server_args(model_folder: ModelFolder) -> None:
    """SGLang's configuration, which its own modules read from the process, not from their caller.

    For tests that run parts of SGLang in this process.
    """
    from sglang.srt.runtime_context import get_context
    from sglang.srt.server_args import ServerArgs

    model = str(model_folder(SglangModel.MLA))
    get_context().set_server_args(ServerArgs(model_path=model, device="cpu"))


@pytest.fixture(scope="session")
def probed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a server whose KV pool tests can look into; see :mod:`pool_probe`."""
    return probe_environment(tmp_path_factory.mktemp("probe"))


@pytest.fixture(scope="session")
def mla_server(
    model_folder: ModelFolder, probed: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SglangServer]:
    """A server of the dense MLA model; its log must be clean in the end."""
    log = tmp_path_factory.mktemp("mla-server") / "log"
    with SglangServer(model_folder(SglangModel.MLA), log, environment=probed) as server:
        yield server
        server.check_clean()


@pytest.fixture(scope="session")
def kv_events() -> str:
    """The endpoint where ``gqa_server`` publishes its KV events."""
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture(scope="session")
def gqa_server(
    model_folder: ModelFolder,
    probed: dict[str, str],
    kv_events: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SglangServer]:
    """A server of the Llama model, with grouped queries, that publishes KV events; its log must
    be clean in the end."""
    log = tmp_path_factory.mktemp("gqa-server") / "log"
    events = json.dumps({"publisher": "zmq", "endpoint": kv_events, "bind": True})
    flags = ("--kv-events-config", events)
    with SglangServer(model_folder(SglangModel.LLAMA), log, flags, probed) as server:
        yield server
        server.check_clean()


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Starts a server of its own for a test whose flags must differ.

    Call it with a model folder, flags and environment as :class:`SglangServer` takes them. It is
    stopped, and its log checked, when the test ends.
    """
    started: list[SglangServer] = []

    def start(model: Path, *flags: str, environment: dict[str, str] | None = None) -> SglangServer:
        server = SglangServer(model, tmp_path / f"server-{len(started)}.log", flags, environment)
        started.append(server)
        server.start()
        return server

    yield start
    try:
        for server in started:
            server.check_clean()
    finally:
        for server in started:
            server.stop()


@pytest.fixture(scope="session")
def reference() -> Callable[[Path], OracleModel]:
    """The models in folders as plain transformers runs them, each loaded once."""
    return lru_cache(maxsize=None)(load_reference)


@pytest.fixture
def start_session(
    reference: Callable[[Path], OracleModel], tmp_path: Path
) -> Callable[[SglangServer, str], PlayedSession]:
    """Begins a session of a given name that is played on a server and on its reference."""

    lock = Lock()

    def start(server: SglangServer, name: str) -> PlayedSession:
        name = f"{tmp_path.name}-{name}"
        return PlayedSession(server, reference(server.model), tmp_path, name, lock=lock)

    return start
