"""The SGLang server that ``--engine sglang`` starts, and stops on every way out."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ..replay.engine_process import shipped_folder
from ..replay.sglang_process import sglang_python
from ..three_arm.server import server_with_control

LAUNCHER = "leyline_lab.fidelity.sglang_server"
"""Starts SGLang on this machine's GPU or CPU, and ends with this process."""
_ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def sglang_with_control(model: str | None, log: Path) -> Iterator[str]:
    """Yield the address of a server with the control, for as long as it is needed.

    Args:
        model: a bundled model, a folder or a hub id; None for the first that ships.
        log: the server's output; removed if all went well.

    Raises:
        EngineProcessError: it doesn't come up.
    """
    log.unlink(missing_ok=True)  # an earlier run's would be shown for this one's
    sglang_python("--engine URL")
    path, flags = model, list[str]()
    if model is not None and (folder := _folder(model)) is not None:
        # Reports name models as the replay engine does, without their place.
        name = model if shipped_folder(model) is not None else folder.resolve().name
        path, flags = str(folder), [f"--served-model-name={name}"]
    with _ending_cleanly(), server_with_control(None, path, log, flags, launcher=LAUNCHER) as url:
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
