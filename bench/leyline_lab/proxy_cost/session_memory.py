"""The memory of an idle session: many sessions of one size in the proxy's own store.

Each holds the turns that the proxy retains, with texts of its own. The figures are the resident
memory of the process, the store's own estimate and, with ``--traced``, the bytes that Python has
allocated, all per session: while in use, and once the store has packed them. Opening them again is
timed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import tracemalloc
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

from rich.console import Console

from leyline_engine.contract import Outcome, Receipt, TokenCounts
from leyline_proxy.model.history import history_chain
from leyline_proxy.model.messages import Message
from leyline_proxy.model.session import Session, TurnSummary
from leyline_proxy.render import ChatRenderer
from leyline_proxy.sessions import MemorySessionStore
from leyline_proxy.sessions.codec import decode_session, encode_session
from leyline_proxy.sessions.freed import give_back_freed

from ..console import write_json
from ..harness.arguments import Arguments
from ..harness.machine import memory_mib
from ..traces.recordings import read_trace
from .agent import opening, renderer_document, rounds
from .turn import retained_turns

GOAL_MB = 0.5
MB = 1e6


def recorded_texts(traces: Path) -> list[str]:
    """Return texts of recorded sessions: what agents really read and write."""
    texts: list[str] = []
    for name in ("sessions_openhands_codeact", "sessions_swe_agent"):
        for session in read_trace(traces / f"{name}.jsonl.gz").sessions:
            texts += [
                str(message["content"])
                for message in session.requests[-1].messages
                if message["role"] == "tool" and message.get("content")
            ]
    return texts


def conversation(
    renderer: ChatRenderer, seed: int, tokens: int, recorded: Sequence[str]
) -> list[Message]:
    """Return a history of so many tokens, roughly, that ends with an assistant's call.

    No other session has the same long text.
    """
    rng = random.Random(seed)
    messages = opening(f"Task {seed}: find out why the cache loses tokens.")
    size = 0
    for said, result in rounds(random.Random(f"session-{seed}"), tokens // 5):
        messages.append(said)
        if size >= tokens:
            break
        if recorded:
            text = rng.choice(recorded)
            start = rng.randrange(max(1, len(text) // 2))
            content = f"{seed}-{len(messages)} {text[start : start + 12_000]}"
            result["content"] = content
        messages.append(result)
        size += len(renderer.encode(said["content"] + result["content"])) + 40
    return messages


def session_of(renderer: ChatRenderer, number: int, messages: Sequence[Message]) -> Session:
    """Return the session after its last turns, and after an account of all before."""
    turns = retained_turns(renderer, messages)
    history = tuple(
        TurnSummary(
            index=index,
            turn=f"t{index}-{number:012x}",
            created=1e9 + index,
            planned=Outcome.UNEDITED,
            reason=None,
            edits=(),
            receipt=Receipt(
                message_id=f"m-{number}-{index}",
                session=f"s-{number}",
                turn=f"t{index}-{number:012x}",
                tokens=TokenCounts(prompt=100 * index, prefix=99 * index, prefilled=index),
            ),
        )
        for index in range(len(messages) // 2)
    )
    weight = 16 * len(turns[-1].rendered.tokens) + 3 * len(json.dumps(list(messages)))
    weighed = tuple(replace(turn, weight=weight) for turn in turns)
    return Session(f"s-{number}", "bench", "", weighed, history, len(history), 1e9, 1e9)


def resident() -> int:
    """Return the bytes of the process that are in memory."""
    return round(memory_mib(os.getpid()) * (1 << 20))


def write_sessions(folder: Path, given: argparse.Namespace) -> list[int]:
    """Put the sessions into files; returns the tokens of their newest prompts."""
    renderer = ChatRenderer(**renderer_document())
    recorded = recorded_texts(given.traces) if given.traces else []
    tokens = []
    for number in range(given.sessions):
        messages = conversation(renderer, number, given.tokens, recorded)
        session = session_of(renderer, number, messages)
        tokens.append(len(session.turns[-1].rendered.tokens))
        (folder / str(number)).write_bytes(encode_session(session))
    return tokens


async def measure(folder: Path, tokens: Sequence[int], given: argparse.Namespace) -> dict[str, Any]:
    """Return the figures."""
    clock = [0.0]
    store = MemorySessionStore(
        max_sessions=10**6, ttl_s=1e9, max_bytes=1 << 40, clock=lambda: clock[0]
    )
    warm = decode_session((folder / "0").read_bytes())
    assert warm is not None  # the memory of code and first use is no session's
    await asyncio.to_thread(encode_session, warm)
    del warm
    if given.traced:
        tracemalloc.start()
    gc.collect()
    give_back_freed()
    traced, held = tracemalloc.get_traced_memory()[0], resident()

    def each(count: int) -> dict[str, float]:
        gc.collect()
        found = {"rss": resident() - held, "reckoned": store.held_bytes}
        if given.traced:
            found["traced"] = tracemalloc.get_traced_memory()[0] - traced
        return {name: round(size / count / MB, 4) for name, size in found.items()}

    in_use: dict[str, float] = {}
    packing = 0.0
    for first in range(0, given.sessions, given.at_once):
        for number in range(first, min(first + given.at_once, given.sessions)):
            # Read from bytes, it shares no object with another session or with its making.
            session = decode_session((folder / str(number)).read_bytes())
            assert session is not None
            chain = history_chain(session.turns[-1].prepared.client_fingerprints)
            await store.update("bench", session.id, partial(_instead, session), chain)
            del session, chain
        in_use = in_use or each(given.at_once)
        clock[0] += 1e6
        started = process_time()
        await store.pack_idle()
        packing += process_time() - started
    idle = each(given.sessions)
    opening: list[float] = []
    for number in range(min(given.sessions, 20)):
        started = process_time()
        assert await store.get("bench", f"s-{number}") is not None
        opening.append(process_time() - started)
    return {
        "sessions": given.sessions,
        "texts": "recorded" if given.traces else "made up",
        "tokens_per_session": round(sum(tokens) / given.sessions),
        "in_use_mb": in_use,
        "idle_mb": idle,
        "pack_cpu_ms": round(1e3 * packing / given.sessions, 2),
        "open_cpu_ms": round(1e3 * median(opening), 2),
    }


def _instead(new: Session, _: Session | None) -> Session:
    """Put a session in the place of what the store has."""
    return new


def main() -> None:
    """Measure, print, write."""
    parser = Arguments(__doc__)
    parser.add_argument("--sessions", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=10, help="sessions in use at a time")
    parser.add_argument("--tokens", type=int, default=100_000, help="of the newest prompt")
    parser.add_argument("--traces", type=Path, help="folder of recordings whose texts are used")
    parser.add_argument("--traced", action="store_true", help="ask tracemalloc, too; slows it down")
    given = parser.parse_args()
    with TemporaryDirectory() as folder, ProcessPoolExecutor(1) as other:
        # Made in another process, so that only the store's memory is measured in this one.
        tokens = other.submit(write_sessions, Path(folder), given).result()
        figures = asyncio.run(measure(Path(folder), tokens, given))
    Console().print_json(data=figures)
    idle = figures["idle_mb"]["rss"]
    print(f"An idle session takes {idle} MB of resident memory; goal {GOAL_MB} MB.")
    write_json(given.json, figures)
