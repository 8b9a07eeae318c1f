"""Replay of a trace through the arms, and their comparison."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import uuid4

from ..engines.stack import Stack, StackOptions, running_stack
from ..errors import AccountError, LabError, RequestRefusedError
from ..traces.recordings import RecordedSession, Trace
from .driver import ChatDriver, Driver
from .results import Arm, ArmRun, Pages, ReplayReport, RequestResult
from .unchanged import common_prefix, unchanged_tokens

Progress = Callable[[Arm, int], None]
"""Called at each step with the arm and the number of requests done or given up."""


def parse_arms(text: str) -> tuple[Arm, ...]:
    """Return the arms of a comma-separated list, each once, in the given order.

    Raises:
        LabError: an unknown arm, one that is named twice, or none.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = {arm.value for arm in Arm}
    for name in names:
        if name not in known:
            raise LabError(f"there is no arm {name!r}; there are {', '.join(sorted(known))}")
    if not names or len(set(names)) != len(names):
        raise LabError("name each arm once, for example: off,radix,splice")
    return tuple(Arm(name) for name in names)


def replay(
    trace: Trace, arms: Sequence[Arm], options: StackOptions, progress: Progress
) -> ReplayReport:
    """Run each arm on a fresh stack.

    ``off`` is computed from the prompts of another arm; alone, it uses those of ``radix``.

    Raises:
        LabError: a stack that does not start or fails, or contradictory figures.
    """
    to_run = [arm for arm in arms if arm is not Arm.OFF] or [Arm.RADIX]
    counter = UnchangedCounter()
    runs: dict[Arm, ArmRun] = {}
    page_tokens = 1
    for arm in to_run:
        progress(arm, 0)
        with running_stack(options, splice=arm is Arm.SPLICE) as stack:
            page_tokens = stack.page_tokens()
            observe = counter.observer(stack) if not runs else None
            driver = ChatDriver(stack.base_url)
            try:
                runs[arm] = run_sessions(driver, trace.sessions, arm, progress, observe)
            finally:
                driver.close()
        check_same_prompts(runs[to_run[0]], runs[arm])
    runs[Arm.OFF] = runs[to_run[0]].switched_off()
    pages = Pages(page_tokens, counter.prefixes)
    return ReplayReport({arm: runs[arm] for arm in arms}, counter.counts, pages)


def run_sessions(
    driver: Driver,
    sessions: Sequence[RecordedSession],
    arm: Arm,
    progress: Progress,
    observe: Callable[[RequestResult], None] | None = None,
) -> ArmRun:
    """Send all requests in order; a refused one ends its session and leaves a note.

    Sessions get new ids in each run, so the same stack can be used again.
    """
    run = uuid4().hex[:8]
    results: list[RequestResult] = []
    notes: list[str] = []
    for number, session in enumerate(sessions):
        label = f"{run}-{number}-{session.id}"
        for turn, request in enumerate(session.requests):
            try:
                result = driver.send(request, session=_header(label), place=(number, turn))
            except RequestRefusedError as refusal:
                left = len(session.requests) - turn
                notes.append(
                    f"{arm}: session {session.id} ends before request {turn + 1} "
                    f"({left} not sent): {refusal}"
                )
                progress(arm, left)
                break
            results.append(result)
            if observe is not None:
                observe(result)
            progress(arm, 1)
    return ArmRun(arm, tuple(results), tuple(notes))


def check_same_prompts(first: ArmRun, other: ArmRun) -> None:
    """Check that two arms served the same prompts, without which they can't be compared.

    Raises:
        AccountError: a request is missing in one of them or has another length.
    """
    mine = {(result.session, result.turn): result.prompt for result in first.results}
    theirs = {(result.session, result.turn): result.prompt for result in other.results}
    differing = sorted(place for place in mine | theirs if mine.get(place) != theirs.get(place))
    if differing:
        session, turn = differing[0]
        raise AccountError(
            f"request {turn + 1} of session {session + 1} has {mine.get((session, turn))} prompt "
            f"tokens in arm {first.arm} and {theirs.get((session, turn))} in arm {other.arm}"
        )


@dataclass(slots=True)
class _Previous:
    session: int
    tokens: array[int]


class UnchangedCounter:
    """Counts the unchanged tokens of each request against the one before it."""

    def __init__(self) -> None:
        self.counts: dict[tuple[int, int], int] = {}
        self.prefixes: dict[tuple[int, int], int] = {}
        """Tokens with which each request begins like the one before it."""
        self._previous: _Previous | None = None

    def observer(self, stack: Stack) -> Callable[[RequestResult], None]:
        """Return a function to call after each request, while the stack still knows its prompt."""

        def observe(result: RequestResult) -> None:
            tokens = stack.last_prompt()
            if len(tokens) != result.prompt:
                raise AccountError(
                    f"request {result.turn + 1} of session {result.session + 1}: the receipt says "
                    f"{result.prompt} prompt tokens, the engine's tokeniser {len(tokens)}"
                )
            self.add(result.session, result.turn, tokens)

        return observe

    def add(self, session: int, turn: int, tokens: array[int]) -> None:
        """Take the next prompt; prompts come in order, session by session."""
        before = self._previous
        if before is not None and before.session == session:
            self.counts[session, turn] = unchanged_tokens(before.tokens, tokens)
            self.prefixes[session, turn] = common_prefix(before.tokens, tokens)
        self._previous = _Previous(session, tokens)


def _header(label: str) -> str:
    """Return a session id that fits into a header."""
    return "".join(char if char.isascii() and char.isprintable() else "_" for char in label)[:200]
