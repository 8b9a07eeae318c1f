"""A time limit for calls into code that nobody here has written."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from threading import Event, Lock, Thread
from typing import Generic, TypeVar

from ..core.prepare import PolicyTimeoutError

T = TypeVar("T")

_STOP_S = 0.1
"""Given to a call that was told to stop."""


class _StoppedError(BaseException):
    """Raised inside a call that takes too long; no ``except Exception`` holds it back."""


class TimeLimit:
    """Runs calls in threads of their own and leaves those that take too long.

    A call that hangs in Python code is stopped. One that hangs elsewhere (a regular expression, a
    foreign library) can't be: its thread stays, and while ``max_stuck`` of them do, no further call
    is made.
    """

    def __init__(self, seconds: float, *, max_stuck: int = 4) -> None:
        self._seconds = seconds
        self._max_stuck = max_stuck
        self._stuck = 0
        self._lock = Lock()

    def __call__(self, call: Callable[[], T]) -> T:
        """What ``call`` returns or raises.

        Raises:
            PolicyTimeoutError: it took too long, or too many calls still hang.
        """
        if self._stuck >= self._max_stuck:
            raise PolicyTimeoutError("too many calls hang")
        running = _Call(call)
        running.thread.start()
        if not running.done.wait(self._seconds):
            self._leave(running)
            raise PolicyTimeoutError("the call takes too long")
        return running.result()

    def _leave(self, running: _Call[T]) -> None:
        stop = ctypes.pythonapi.PyThreadState_SetAsyncExc
        stop(ctypes.c_ulong(running.thread.ident or 0), ctypes.py_object(_StoppedError))
        if running.done.wait(_STOP_S):
            return
        with self._lock:
            self._stuck += 1
        Thread(target=self._await_end, args=(running,), daemon=True).start()

    def _await_end(self, running: _Call[T]) -> None:
        running.done.wait()
        with self._lock:
            self._stuck -= 1


class _Call(Generic[T]):
    """One call and what came of it."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.done = Event()
        self.thread = Thread(target=self._run, name="leyline-policy", daemon=True)
        self._call = call
        self._value: list[T] = []
        self._error: BaseException | None = None

    def result(self) -> T:
        """What it returned. Raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._value[0]

    def _run(self) -> None:
        try:
            self._value.append(self._call())
        except BaseException as error:  # handed on to the caller
            self._error = error
        finally:
            self.done.set()
