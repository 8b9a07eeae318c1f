"""A real SGLang server on a loopback port, as a process in its own environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from .engine_process import SHIPPED_NAME, EngineKind, EngineProcess, engine_server, shipped_model

PYTHON_VARIABLE = "LEYLINE_SGLANG_PYTHON"
"""Environment variable: interpreter of the environment with SGLang."""
CPU_LAUNCHER = "leyline_lab.sglang_cpu.launch"
SGLANG = EngineKind(
    "SGLang",
    ("sglang",),
    PYTHON_VARIABLE,
    Path(".venv-sglang/bin/python"),
    "make sglang-setup",
)


def sglang_python(flag: str = "--url") -> str:
    """Return an interpreter with SGLang; see :meth:`~.engine_process.EngineKind.python`.

    Args:
        flag: the command's flag for a running server.

    Raises:
        EngineProcessError: there is none.
    """
    return SGLANG.python(flag)


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
