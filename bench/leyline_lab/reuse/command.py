"""``leyline bench reuse``: content-addressed reuse, pattern by pattern."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..console import reported, write_json
from ..errors import LabError
from ..options import ApiKey, JsonOut, Plot, ServerFlag

if TYPE_CHECKING:
    from rich.console import Console

    from .workload import TextRequest, Workload


@dataclass(frozen=True, slots=True)
class Server:
    """The options that say where the model runs."""

    url: str | None
    api_key: str | None
    model: str | None
    flags: tuple[str, ...]
    log: Path


class ReuseEngine(StrEnum):
    """Engines that have this benchmark."""

    REPLAY = "replay"
    SGLANG = "sglang"


def command(
    *,
    engine: Annotated[
        ReuseEngine, typer.Option(help="replay: in this process; sglang: a server.")
    ] = ReuseEngine.REPLAY,
    traces: Annotated[
        Path | None,
        typer.Option(help="Folder with sessions_*.jsonl.gz; by default the demo's own session."),
    ] = None,
    patterns: Annotated[
        str | None, typer.Option(help="Patterns, separated by commas; by default all.")
    ] = None,
    requests: Annotated[int, typer.Option(min=4, help="Requests per pattern.")] = 12,
    tokens: Annotated[
        int, typer.Option(min=1, max=64, help="Tokens per answer, over which KL is taken.")
    ] = 16,
    scale: Annotated[
        float, typer.Option(min=0.1, help="1 is a prompt of about 2,000 characters.")
    ] = 1.0,
    model: Annotated[
        str | None, typer.Option(help="Folder or hub id; by default the model that ships.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="A running SGLang; without it, one starts on the CPU.")
    ] = None,
    api_key: ApiKey = None,
    server_flag: ServerFlag = None,
    log: Annotated[Path, typer.Option(help="Log file of the server that is started.")] = Path(
        "out/reuse_sglang.log"
    ),
    json_out: JsonOut = None,
    plot: Plot = None,
) -> None:
    """Send prompts that share content but no beginning, with reuse live and without.

    Several sessions of one tenant send real text in six patterns, without
    markers: agent_meta, sysvar, compact, rerank, tool_variants, clock. Each
    pattern begins with empty caches, and nothing is evicted.

    \b
    The JSON: {"patterns": {NAME: figures}}. Shares are of all prompt tokens:
    prefix       served by the exact prefix
    additional   reused beyond it
    total        their sum
    recoverable  tokens outside the prefix that lie in a verbatim run of 64
                 tokens or more: equal ids in the prompt and in one sequence
                 whose KV is in the cache when the request arrives, without
                 the first 32 positions of either and without the prompt's
                 last token, which no reuse may serve. A run may begin in the
                 prefix. The engine is asked for its cached sequences, not its
                 index; with sglang they are all sequences so far, as its pool
                 holds more.
    The goal: total >= prefix + 0.98 * recoverable ("goal_met").

    \b
    ttft_ratio_to_radix: time to the first token, over that of the same request
    with exact prefixes only; median, without each pattern's first request.
    kl, argmax_match: mean KL(p_full || p_x) per token in nats, and the share
    of equal likeliest tokens, along the greedy tokens of a full prefill in
    fp32 (sglang: in the server's dtype). first_divergence: mean number of
    equal tokens before the first other one in greedy decoding; at most
    --tokens. null: not measured.
    "arms": naive copies without rotation (sglang: not with --url); cdc finds
    only whole chunks whose ends follow from the content (32 to 512 tokens);
    lmcache finds runs of 256 tokens at multiples of 256 in a source.

    \b
    Example: leyline bench reuse --engine replay --json out/reuse.json
    """
    from rich.console import Console

    from ..traces.texts import demo_material, recorded_material
    from .report import draw, print_patterns
    from .workload import Workload

    server = Server(url, api_key, model, tuple(server_flag or ()), log)
    with reported("leyline bench", ValueError) as console:
        chosen = chosen_patterns(patterns)
        material = demo_material() if traces is None else recorded_material(traces)
        workload = Workload(material, requests, scale)
        run = _replay if engine is ReuseEngine.REPLAY else _sglang
        document = run(server, workload, chosen, tokens, console)
        if plot is not None:
            draw(document, plot)
    print_patterns(Console(), document, f"reuse on {engine.value}, {document['model']}")
    write_json(json_out, document)


def chosen_patterns(text: str | None) -> tuple[str, ...]:
    """Return the patterns of a list; all without one.

    Raises:
        ValueError: there is no such pattern.
    """
    from .workload import PATTERNS

    if text is None:
        return tuple(PATTERNS)
    chosen = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in chosen:
        if name not in PATTERNS:
            raise ValueError(f"there is no pattern {name!r}; there are {', '.join(PATTERNS)}")
    return chosen


def _replay(
    server: Server, workload: Workload, patterns: Sequence[str], tokens: int, console: Console
) -> dict[str, Any]:
    from rich.progress import Progress

    from ..packages import replay_engine
    from .figures import pattern_json
    from .workload import assembled, texts_of

    with replay_engine():
        from .replay_engine import ReplayReuseBench

    try:
        bench = ReplayReuseBench(server.model, tokens)
    except Exception as error:  # loading a model may raise any error of its libraries
        raise LabError(
            f"the replay engine can't start ({type(error).__name__}): {error}"
        ) from error
    found: dict[str, Any] = {}
    with Progress(console=console) as progress:
        for pattern in patterns:
            written = workload.write(pattern)
            texts = texts_of(written)
            requests = assembled(written, dict(zip(texts, bench.tokenise(texts), strict=True)))
            task = progress.add_task(pattern, total=len(requests))
            samples = bench.measure(requests, partial(progress.advance, task))
            found[pattern] = pattern_json(samples)
    return {"engine": "replay", "model": bench.name, "patterns": found}


def _sglang(
    server: Server, workload: Workload, patterns: Sequence[str], tokens: int, console: Console
) -> dict[str, Any]:
    from ..engines.sglang import server_with_control
    from .sglang import stored_tokens

    written = {pattern: workload.write(pattern) for pattern in patterns}
    # Tokens of at least a byte each; each pattern begins with an empty pool.
    slots = max(
        sum(stored_tokens(len("".join(r.parts).encode()), tokens) for r in requests)
        for requests in written.values()
    )
    flags = (f"--max-total-tokens={slots}", *server.flags)
    with server_with_control(server.url, server.model, server.log, flags) as address:
        return asyncio.run(_measure(address, server, written, tokens, console))


async def _measure(
    address: str,
    server: Server,
    written: Mapping[str, Sequence[TextRequest]],
    tokens: int,
    console: Console,
) -> dict[str, Any]:
    from rich.progress import Progress

    from ..errors import ServerAnswerError
    from ..three_arm.clients import GenerateClient
    from .figures import pattern_json
    from .sglang import SglangReuseBench
    from .workload import assembled, texts_of

    client = GenerateClient(address, server.api_key)
    found: dict[str, Any] = {}
    try:
        capability = await client.capability()
        if not capability.reuses:
            raise ServerAnswerError("this server reuses nothing: its plugin is too old, or off")
        bench = SglangReuseBench(client, capability, tokens, control=server.url is None)
        with Progress(console=console) as progress:
            for pattern, asked in written.items():
                texts = texts_of(asked)
                parts = dict(zip(texts, await client.tokenise(texts), strict=True))
                requests = assembled(asked, parts)
                task = progress.add_task(pattern, total=len(requests))
                samples = await bench.measure(requests, partial(progress.advance, task))
                found[pattern] = pattern_json(samples)
    finally:
        await client.close()
    return {"engine": "sglang", "model": capability.model, "patterns": found}
