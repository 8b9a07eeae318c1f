"""A real SGLang server on a loopback port, as a process in its own environment."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ..errors import EngineProcessError
from .process import (
    SHIPPED_NAME,
    EngineKind,
    EngineProcess,
    engine_server,
    shipped_folder,
    shipped_model,
)

PYTHON_VARIABLE = "LEYLINE_SGLANG_PYTHON"
"""Environment variable: interpreter of the environment with SGLang."""
CPU_LAUNCHER = "leyline_lab.sglang_cpu.launch"
EVALUATION_LAUNCHER = "leyline_lab.engines.sglang_evaluation"
"""Starts SGLang on this machine's GPU or CPU, and ends with this process."""
SGLANG = EngineKind(
    "SGLang",
    ("sglang",),
    PYTHON_VARIABLE,
    Path(".venv-sglang/bin/python"),
    "make sglang-setup",
)
_CONTROL = "leyline_lab.three_arm.unrotated"
_ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def sglang_server(
    model: Path | str | None,
    log: Path,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    *,
    launcher: str = CPU_LAUNCHER,
) -> Iterator[EngineProcess]:
    """Run a healthy server, and stop it at the end.

    Args:
        model: folder or hub id; by default the shipped one.
        log: file for all its output.
        flags: SGLang's, over the launcher's defaults.
        environment: variables added to this process's.
        launcher: module that starts SGLang; by default Leyline's for this machine's CPU.

    Raises:
        EngineProcessError: it doesn't come up.
    """
    named = ["--model-path", str(model or shipped_model())]
    if model is None:
        named += ["--served-model-name", SHIPPED_NAME]
    flags = [*named, *flags]
    with engine_server(SGLANG, launcher, flags, log, environment or {}) as server:
        yield server


@contextmanager
def server_with_control(
    url: str | None,
    model: str | None,
    log: Path,
    flags: Sequence[str],
    *,
    launcher: str = CPU_LAUNCHER,
) -> Iterator[str]:
    """Yield the address of a server.

    Args:
        url: of a running one, to which the other arguments don't apply; None starts one that leaves
            the keys of the control's sessions unrotated.
        flags: SGLang's.
        launcher: see :func:`sglang_server`.

    Raises:
        EngineProcessError: it doesn't come up.
    """
    if url is not None:
        yield url.rstrip("/")
        return
    with tempfile.TemporaryDirectory(prefix="leyline-control-") as control:
        python = SGLANG.python()
        try:
            subprocess.run([python, "-P", "-m", _CONTROL, control], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise EngineProcessError(
                f"{python} can't run Leyline's part of SGLang: install leyline-kv there"
            ) from error
        paths = [control, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"PYTHONPATH": os.pathsep.join(paths)}
        with sglang_server(model, log, flags, environment, launcher=launcher) as server:
            yield server.url


@contextmanager
def evaluation_server(model: str | None, log: Path) -> Iterator[str]:
    """Yield the address of a server with the control, and stop it on every way out.

    Args:
        model: a bundled model, a folder or a hub id; None for the first that ships.
        log: the server's output; removed if all went well.

    Raises:
        EngineProcessError: it doesn't come up.
    """
    log.unlink(missing_ok=True)  # an earlier run's would be shown for this one's
    SGLANG.python("--engine URL")
    path, flags = model, list[str]()
    if model is not None and (folder := _folder(model)) is not None:
        # Reports name models as the replay engine does, without their place.
        name = model if shipped_folder(model) is not None else folder.resolve().name
        path, flags = str(folder), [f"--served-model-name={name}"]
    launcher = EVALUATION_LAUNCHER
    with _ending_cleanly(), server_with_control(None, path, log, flags, launcher=launcher) as url:
        yield url
    log.unlink(missing_ok=True)


def _folder(model: str) -> Path | None:
    """Return a model's folder; None for a hub id."""
    shipped = shipped_folder(model)
    if shipped is not None:
        return shipped
    path = Path(model).expanduser()
    return path if path.is_dir() else None


@contextmanager
def _ending_cleanly() -> Iterator[None]:
    """Turn signals that end this process into Ctrl-C, so that the server is stopped first."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, interrupt) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
