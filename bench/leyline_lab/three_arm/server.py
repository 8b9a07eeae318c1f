"""The server that benchmarks measure: one that runs, or one that is started with the control."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..replay.engine_process import EngineProcessError
from ..replay.sglang_process import CPU_LAUNCHER, sglang_python, sglang_server

_CONTROL = "leyline_lab.three_arm.unrotated"


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
        launcher: see :func:`~..replay.sglang_process.sglang_server`.

    Raises:
        EngineProcessError: it doesn't come up.
    """
    if url is not None:
        yield url.rstrip("/")
        return
    with tempfile.TemporaryDirectory(prefix="leyline-control-") as control:
        python = sglang_python()
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
