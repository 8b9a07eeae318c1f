"""Start an SGLang server on a CPU: ``python -m leyline_lab.sglang_cpu.launch --model-path …``.

It takes SGLang's own flags, which win over the defaults here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from leyline_lab.sglang_cpu.activation import activate

DEFAULT_FLAGS = (
    # A pool and request table that fit a laptop; SGLang sizes both for a GPU.
    "--max-total-tokens=16384",
    "--max-running-requests=8",
    "--chunked-prefill-size=512",
    # Slots of recurrent states, which SGLang lets take what memory is left.
    "--max-mamba-cache-size=256",
    "--dtype=float32",
    "--radix-cache-backend=leyline",
    # Otherwise an idle server keeps a core busy.
    "--sleep-on-idle",
    # Answers give the number of tokens that came from the cache.
    "--enable-cache-report",
    "--enable-metrics",
)


def server_command(flags: Sequence[str]) -> list[str]:
    """Return the command line of a server with ``flags``; the last mention of a flag counts."""
    return [sys.executable, "-P", "-m", "sglang.launch_server", *DEFAULT_FLAGS, *flags]


def main() -> None:
    """Become the server; refuse if SGLang wouldn't take this platform."""
    if activate() is None:
        sys.exit(
            "error: this launcher is for machines without an accelerator, where "
            "SGLANG_USE_CPU_ENGINE isn't set.\n       Here, run: sglang serve --model-path MODEL"
        )
    command = server_command(sys.argv[1:])
    os.execv(command[0], command)  # noqa: S606 - the user's own flags


if __name__ == "__main__":
    main()
