"""The examination: concurrent checks, each with a time limit, and their report."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ..settings.readable import ReadablePart
from .findings import Finding, Status, fail, skip

T = TypeVar("T")

_ENGINES = ("upstream", "upstreams", "router", "engine", "engine_options", "model")
_READ_BY = {
    "redis": ("session_store",),
    "session-secret": ("session_store", "session_secret"),
    "api-keys": ("api_keys", "api_keys_file", "tenants"),
    "allowed-hosts": ("api_keys", "api_keys_file", "allowed_hosts", "host"),
    "policies": ("policy", "policies_file", "tenants"),
    "ports": ("host", "port", "admin_host", "admin_port"),
    "audit": ("audit_file",),
    "audit.redis": ("audit_redis",),
    "recall-store": ("recall_store", "recall_key"),
    "warm-start": ("warm_start_path", "warm_start_key"),
    "trace": ("trace",),
}
"""Settings without which a check would examine something else, by the beginning of its name."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check and its time limit. A check that takes longer fails."""

    ask: Callable[[], Awaitable[Sequence[Finding]]]
    limit_s: float


async def examine(
    checks: Mapping[str, Check], *, ended: Callable[[str], None] = lambda _: None
) -> list[Finding]:
    """Run the checks, and return their findings in order.

    Args:
        ended: called with the name of each check that has ended.
    """

    async def one(name: str, check: Check) -> Sequence[Finding]:
        try:
            async with asyncio.timeout(check.limit_s):
                return await check.ask()
        except TimeoutError:
            return [
                fail(
                    name,
                    f"got no answer within {check.limit_s:g} s",
                    "Check whether the server is overloaded, or a firewall drops packets on the "
                    "way. --timeout waits longer.",
                )
            ]
        except Exception as error:  # the other checks' findings matter, too
            kind = type(error).__name__
            return [fail(name, f"could not be checked ({kind})", "Report this bug to Leyline.")]
        finally:
            ended(name)

    results = await asyncio.gather(*(one(name, check) for name, check in checks.items()))
    return [finding for result in results for finding in result]


async def in_thread(ask: Callable[[], T]) -> T:
    """Return or raise the result of ``ask``, from a thread that doesn't delay the exit.

    A thread of the loop's own would be awaited at the end: forever, on a disk or a pipe that never
    answers.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(setter: Callable[[], None]) -> None:
        if not answer.done():
            setter()

    def run() -> None:
        try:
            setter = partial(answer.set_result, ask())
        except Exception as error:
            setter = partial(answer.set_exception, error)
        with suppress(RuntimeError):  # the loop and its caller are gone
            loop.call_soon_threadsafe(settle, setter)

    threading.Thread(target=run, name="leyline-doctor", daemon=True).start()
    return await answer


def without_missing(checks: Mapping[str, Check], part: ReadablePart) -> dict[str, Check]:
    """Return the checks that the part's settings suffice for."""
    gone = part.missing | part.invented
    return {name: check for name, check in checks.items() if gone.isdisjoint(_needs(name))}


def findings_of_part(
    broken: Sequence[Finding], part: ReadablePart, findings: Sequence[Finding]
) -> list[Finding]:
    """Return the whole report: first the errors, then what was found without those settings."""
    if not broken:
        return [*findings]
    found = [each for each in findings if (each.name, each.status) != ("config", Status.OK)]
    notes = []
    if part.missing:
        names = ", ".join(sorted(part.missing))
        notes.append(skip("config", f"the rest is examined without {names}"))
    return [*broken, *notes, *found]


def _needs(check: str) -> tuple[str, ...]:
    own = _READ_BY.get(check, ())
    return own or (_ENGINES if check.startswith("upstream.") else ())
