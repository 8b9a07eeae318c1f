"""Places where policies raise, and the log of their faults: types, files and lines, no words."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from traceback import StackSummary, walk_stack, walk_tb
from types import FrameType

import structlog

from leyline_policies import run

from ..model.prepared import FaultOrigin, PolicyFault

log = structlog.get_logger("leyline.turn")

_FRAMES = 8
"""Largest number of calls shown; a policy that calls itself without end makes a thousand."""
_SHOWN = 200
"""Largest number of characters of a name, a file's or a type's."""
_PAUSE_S = 60.0
_MOST = 256
"""Largest number of faults that are remembered."""


def origin_of(error: BaseException) -> FaultOrigin:
    """Return the place where a policy raised ``error``.

    An error's own words, its notes, and the variables of its frames are left out.
    """
    cause = error.__cause__
    if cause is not None and not isinstance(cause, Exception):
        error = cause  # an exit that was raised in a thread, and wrapped on its way here
    return FaultOrigin(type(error).__name__[:_SHOWN], _shown([*walk_tb(error.__traceback__)]))


def place_of(thread: int | None) -> tuple[str, ...]:
    """Return the calls that a thread is in, as in `FaultOrigin`; none if it has ended."""
    frame = sys._current_frames().get(thread or 0)
    return _shown([*walk_stack(frame)][::-1]) if frame is not None else ()


def _shown(frames: list[tuple[FrameType, int]]) -> tuple[str, ...]:
    """Return the innermost of the calls that a policy made, the innermost last."""
    calls = [at for at, (frame, _) in enumerate(frames) if frame.f_code is run.__code__]
    own = frames[calls[-1] + 1 :] if calls else []
    found = StackSummary.extract(iter((own or frames)[-_FRAMES:]), lookup_lines=False)
    return tuple(f"{_tail(each.filename)}:{each.lineno} {each.name[:_SHOWN]}" for each in found)


def _tail(name: str) -> str:
    return name if len(name) <= _SHOWN else f"...{name[-_SHOWN:]}"


@dataclass(slots=True)
class _Seen:
    """One fault at one place."""

    logged: float
    """Time of its last line."""
    repeats: int = 0
    """Number of times that it has occurred since."""


class FaultLog:
    """Logs faults of policies, each kind at most once a minute. Safe to use from several threads.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._seen: dict[tuple[str, ...], _Seen] = {}

    def add(self, fault: PolicyFault, tenant: str) -> None:
        """Log a fault, with the number of its repeats since its last line."""
        origin = fault.origin
        # A call that hangs is found at another line each time.
        place = _place(origin) if fault.fault == "raised" else ()
        repeats = self._repeats((fault.policy, fault.fault, *place))
        if repeats is None:
            return
        said = {"error": origin.error, "frames": list(origin.frames)} if origin else {}
        log.warning(
            "policy_failed",
            tenant=tenant,
            policy=fault.policy,
            fault=fault.fault,
            repeats=repeats,
            **said,
        )

    def _repeats(self, key: tuple[str, ...]) -> int | None:
        """Return the number of repeats to log; None if it is too early for a line."""
        now = self._clock()
        with self._lock:
            seen = self._seen.pop(key, None)
            if seen is not None and now - seen.logged < _PAUSE_S:
                seen.repeats += 1
                self._seen[key] = seen
                return None
            while len(self._seen) >= _MOST:
                self._seen.pop(next(iter(self._seen)))
            self._seen[key] = _Seen(now)
        return seen.repeats if seen is not None else 0


def _place(origin: FaultOrigin | None) -> tuple[str, ...]:
    return (origin.error, *origin.frames[-1:]) if origin is not None else ()
