"""A child process that is started again when it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

import structlog

from .orders import EngineOrder, WorkerOrder, packed

log = structlog.get_logger("leyline.workers")

_FIRST_PAUSE_S = 0.2
_LAST_PAUSE_S = 30.0
_STEADY_S = 60.0
"""A process that ran for so long is started again at once."""


class Child:
    """One process, and its successors.

    Args:
        module: run as ``python -m``.
        order: returns the order for the next process.
        files: descriptors that it inherits.
        name: for logs.
    """

    def __init__(
        self,
        module: str,
        order: Callable[[], WorkerOrder | EngineOrder],
        *,
        name: str,
        files: Sequence[int] = (),
    ) -> None:
        self._module = module
        self._order = order
        self._name = name
        self._files = tuple(files)
        self._process: asyncio.subprocess.Process | None = None
        self.stopping = False
        self._stopped = asyncio.Event()
        self.served = False
        """True once a process of this child has served."""

    async def run(self) -> int:
        """Run processes until one ends that must not be followed; return its exit status.

        That is one before any has served: it would fail again in the same way.
        """
        loop, pause_s = asyncio.get_running_loop(), _FIRST_PAUSE_S
        while True:
            began = loop.time()
            status = await self._run_one()
            if self.stopping or not self.served:
                return status
            lasted = loop.time() - began
            pause_s = _FIRST_PAUSE_S if lasted > _STEADY_S else min(_LAST_PAUSE_S, 2 * pause_s)
            log.error("process_died", process=self._name, status=status, lasted_s=round(lasted, 1))
            if await self._stops_within(pause_s):
                return status

    def send(self, number: int) -> None:
        """Send a signal to the process, if it runs."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End the process for good."""
        self.stopping = True
        self._stopped.set()
        self.send(number)

    async def _stops_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._stopped.wait()
        except TimeoutError:
            return False
        return True

    async def _run_one(self) -> int:
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # nothing is imported from the current directory, as in this process
            "-m",
            self._module,
            stdin=asyncio.subprocess.PIPE,
            pass_fds=self._files,
            env={**os.environ},
            start_new_session=True,  # keyboard signals reach it through the supervisor
        )
        assert process.stdin is not None  # noqa: S101 - asked for
        with suppress(OSError):
            process.stdin.write(packed(self._order()))
            await process.stdin.drain()
        try:
            return await process.wait()
        finally:
            process.stdin.close()
