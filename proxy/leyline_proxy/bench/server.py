"""The server that benchmarks measure: one that runs, or one that is started with the control."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..replay.sglang_process import sglang_python, sglang_server

_CONTROL = "leyline_engine.benches.unrotated"


@contextmanager
def server_with_control(
    url: str | None, model: str | None, log: Path, flags: Sequence[str]
) -> Iterator[str]:
    """Yield the address of a server.

    Args:
        url: of a running one, to which the other arguments don't apply; None starts one that leaves
            the keys of the control's sessions unrotated.
        flags: SGLang's.

    Raises:
        SglangProcessError: it doesn't come up.
    """
    if url is not None:
        yield url.rstrip("/")
        return
    with tempfile.TemporaryDirectory(prefix="leyline-control-") as control:
        subprocess.run([sglang_python(), "-P", "-m", _CONTROL, control], check=True)  # noqa: S603
        with sglang_server(model, log, flags, {"PYTHONPATH": control}) as server:
            yield server.url
