"""``leyline bench user-turn``: the user's next message after a loop of tool calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..console import reported, write_json
from ..options import JsonOut, Plot

if TYPE_CHECKING:
    from ..engines.stack import StackOptions
    from .figures import TurnArm
    from .run import Workload

STRIP_FLAG = "--strip-thinking-cache"
_PARSERS = ("--reasoning-parser=qwen3", "--tool-call-parser=qwen25")
"""SGLang's parsers for the model that ships. Without the first, SGLang counts no thinking, and its
flag does nothing."""
_CALL_TOKENS = 160
"""Largest average number of tokens per call, with its thinking and its output."""
_SHARES_OF_POOL = 3
_LEAST_POOL = 16_384


class TurnEngine(StrEnum):
    """Engines that have this benchmark."""

    REPLAY = "replay"
    SGLANG = "sglang"


@dataclass(frozen=True, slots=True)
class Place:
    """The options that say where the model runs."""

    engine: TurnEngine
    model: str
    url: str | None
    strip_url: str | None
    flags: tuple[str, ...]
    log: Path

    def missing(self) -> dict[TurnArm, str]:
        """Return arms that can't be measured, with the reasons."""
        from .figures import TurnArm

        if self.engine is TurnEngine.REPLAY:
            reason = f"{STRIP_FLAG} is a flag of SGLang: add --engine sglang"
        elif self.url is not None and self.strip_url is None:
            reason = f"it takes a second server, started with {STRIP_FLAG}: give --strip-url"
        else:
            return {}
        return {TurnArm.STRIP: reason}


def command(
    *,
    engine: Annotated[
        TurnEngine, typer.Option(help="replay: in this process; sglang: a server.")
    ] = TurnEngine.REPLAY,
    calls: Annotated[int, typer.Option(min=1, help="Tool calls per loop.")] = 20,
    user_turns: Annotated[
        int, typer.Option(min=1, help="Loops per session; after each, the user speaks.")
    ] = 2,
    sessions: Annotated[int, typer.Option(min=1, help="Sessions per arm, one by one.")] = 4,
    model: Annotated[
        str, typer.Option(help="A bundled model, a folder or a hub id; its template must strip.")
    ] = "leyline-recall-thinking",
    url: Annotated[
        str | None,
        typer.Option(help="A running SGLang, which is flushed! Without it, one starts on the CPU."),
    ] = None,
    strip_url: Annotated[
        str | None, typer.Option(help=f"Another one, started with {STRIP_FLAG}; for arm strip.")
    ] = None,
    server_flag: Annotated[
        list[str] | None,
        typer.Option(help="Flag for the servers that are started, such as --tp=2; repeatable."),
    ] = None,
    log: Annotated[Path, typer.Option(help="Log file of the servers that are started.")] = Path(
        "out/user_turn_sglang.log"
    ),
    json_out: JsonOut = None,
    plot: Plot = None,
) -> None:
    """Let an agent think and call tools in a loop; then the user speaks, and its thinking goes.

    Every arm is a proxy with its default settings in front of an empty cache.
    radix: exact prefixes. strip: the same, on an SGLang with
    --strip-thinking-cache, which keeps no generated token. splice: Leyline.
    full: nothing cached. All figures are for the first request after a loop.

    \b
    The JSON: {"arms": {ARM: figures}, "floor": …, "goal": …}. Tokens are means
    per request, times are in ms. An arm that can't be measured here has
    "available": false and a reason.
    changed_and_new_tokens  of the prompt, without those that the turn before
                            has, with its answer, in the same order
    most_prefilled_beyond   worst request: prefilled tokens beyond these, as a
                            share of the prompt (goal: at most 0.01)
    unchanged_reused        share of the other tokens that wasn't prefilled
    least_unchanged_reused  the same for the worst request (goal: at least 0.99)
    agreement               with the greedy answer of the same prompt in an
                            empty cache: shares of sessions, answers and tokens
                            that are equal; logit_delta is the largest
                            difference of log probabilities, while both chose
                            the same tokens
    loop_prefilled_tokens   per request of the loops
    "floor": the same prompts with other words at the end, the rest cached.

    \b
    Example: leyline bench user-turn --engine sglang --json out/user_turn.json
    """
    from rich.console import Console

    from leyline_proxy.telemetry.logging import configure_logging

    from .report import draw, print_arms
    from .run import Workload

    configure_logging("error", "json")
    with reported("leyline bench", ValueError) as console:
        if engine is TurnEngine.REPLAY and (url or strip_url or server_flag):
            raise ValueError("--url, --strip-url and --server-flag need --engine sglang")
        workload = Workload(calls, user_turns, sessions)
        workload.loops(0)  # refuses a size before a server starts
        place = Place(engine, model, url, strip_url, tuple(server_flag or ()), log)
        document = _measure(place, workload, console)
        if plot is not None:
            draw(document, plot)
    print_arms(Console(), document)
    write_json(json_out, document)


def _measure(place: Place, workload: Workload, console: Any) -> dict[str, Any]:
    from rich.progress import Progress

    from .figures import TurnArm
    from .figures import document as figures

    missing = place.missing()
    found: dict[TurnArm, Any] = {}
    floor: Sequence[Any] = ()
    full: Sequence[Any] = ()
    with Progress(console=console) as progress:
        for group in ((TurnArm.RADIX, TurnArm.SPLICE), (TurnArm.STRIP,)):
            arms = [arm for arm in group if arm not in missing]
            if not arms:
                continue
            task = progress.add_task(" and ".join(arms), total=None)
            with _stack(place, workload, strip=TurnArm.STRIP in group) as options:
                progress.update(task, total=_requests(workload, arms))
                measured = _group(arms, workload, options, partial(progress.advance, task))
            found |= measured.samples
            floor, full = floor or measured.floor, full or measured.full
    document = figures(found, floor, full, missing)
    head = {"engine": place.engine.value, "model": place.model}
    size = {"calls": workload.calls, "user_turns": workload.user_turns}
    return head | size | {"sessions": workload.sessions} | document


@dataclass(frozen=True, slots=True)
class _Measured:
    samples: dict[TurnArm, Any]
    floor: Sequence[Any]
    full: Sequence[Any]


def _requests(workload: Workload, arms: Sequence[TurnArm]) -> int:
    """Return the number of steps of some arms: requests, floors and full prefills."""
    from .figures import TurnArm

    questions = workload.sessions * workload.user_turns
    return len(arms) * (workload.requests + questions) + questions * (TurnArm.RADIX in arms)


def _group(
    arms: Sequence[TurnArm],
    workload: Workload,
    options: StackOptions,
    advance: Callable[[], None],
) -> _Measured:
    """Measure arms on one server, then the full prefills of their prompts."""
    from .figures import TurnArm
    from .run import FullPrefills, run_arm

    runs = {arm: run_arm(arm, workload, options, advance) for arm in arms}
    prefills = FullPrefills(options, advance)
    samples = {arm: run.samples(prefills) for arm, run in runs.items()}
    splice = runs.get(TurnArm.SPLICE)
    full = [prefills.answer(asked.request).result for asked in splice.asked] if splice else []
    return _Measured(samples, [each for run in runs.values() for each in run.floor], full)


@contextmanager
def _stack(place: Place, workload: Workload, *, strip: bool) -> Iterator[StackOptions]:
    """Yield the options of stacks, while their server runs."""
    from ..engines.process import shipped_folder
    from ..engines.sglang import sglang_server
    from ..engines.stack import StackOptions

    if place.engine is TurnEngine.REPLAY:
        yield StackOptions(model=place.model)
        return
    url = place.strip_url if strip else place.url
    if url is not None:
        yield StackOptions(engine_url=url.rstrip("/"))
        return
    each = workload.user_turns * (workload.calls + 2) * _CALL_TOKENS
    shipped = shipped_folder(place.model)
    flags = [
        f"--max-total-tokens={max(_LEAST_POOL, _SHARES_OF_POOL * each)}",
        f"--served-model-name={place.model}",
        *(_PARSERS if shipped is not None else ()),
        *([STRIP_FLAG] if strip else []),
        *place.flags,
    ]
    log = place.log.with_stem(f"{place.log.stem}_strip") if strip else place.log
    with sglang_server(shipped or place.model, log, flags) as server:
        yield StackOptions(engine_url=server.url)
