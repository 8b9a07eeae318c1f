"""Start SGLang with Leyline for an evaluation, on this machine's GPU or CPU.

``python -m leyline_lab.engines.sglang_evaluation --model-path …`` takes SGLang's own flags, which
win over the defaults here. The server ends when the process that started it ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

from leyline_engine.settings import (
    MIN_COPY_VARIABLE,
    PROFILE_VARIABLE,
    STAGE_COST_VARIABLE,
)
from leyline_lab.sglang_cpu.activation import activate
from leyline_lab.sglang_cpu.launch import server_command

_ON_CPU = (
    # Room for the longest history that is measured, and for its edited copy.
    "--max-total-tokens=32768",
)
_ON_GPU = (
    "--radix-cache-backend=leyline",
    "--enable-cache-report",
)
_SET_PARENT_DEATH_SIGNAL = 1
"""``PR_SET_PDEATHSIG`` of Linux."""


def evaluation_command(flags: Sequence[str], *, on_cpu: bool) -> list[str]:
    """Return the command line of a server; the last mention of a flag counts.

    Args:
        on_cpu: True for Leyline's platform for machines without a GPU.
    """
    if on_cpu:
        return server_command([*_ON_CPU, *flags])
    return [sys.executable, "-P", "-m", "sglang.launch_server", *_ON_GPU, *flags]


def main() -> None:
    """Become the server."""
    if sys.platform == "linux":
        # It outlives exec: the server gets SIGTERM when its parent is gone, however that ended.
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    # Short copies may not pay; here they are what is measured.
    os.environ.setdefault(MIN_COPY_VARIABLE, "1")
    os.environ.setdefault(STAGE_COST_VARIABLE, "0")
    # With a profile of its own, the engine would compute more again in every arm.
    os.environ.pop(PROFILE_VARIABLE, None)
    command = evaluation_command(sys.argv[1:], on_cpu=activate() is not None)
    os.execv(command[0], command)  # noqa: S606 - the user's own flags


if __name__ == "__main__":
    main()
