"""``leyline bench three-arm``: the message-edit benchmark on a live server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..console import reported, write_json
from ..options import ApiKey, JsonOut, Plot, ServerFlag

if TYPE_CHECKING:
    from rich.console import Console

    from .clients import BenchClient
    from .figures import BenchArm
    from .running import BenchOptions, Level

_ARMS = "off,radix,splice,naive"


class BenchEngine(StrEnum):
    """Engines that have this benchmark."""

    SGLANG = "sglang"
    VLLM = "vllm"


class KvDtype(StrEnum):
    """Values of SGLang's ``--kv-cache-dtype`` with which this benchmark's splices are tested."""

    AUTO = "auto"
    """The model's own dtype."""
    BFLOAT16 = "bfloat16"
    FP8 = "fp8_e4m3"


def command(
    *,
    engine: Annotated[BenchEngine, typer.Option(help="Engine to measure.")] = BenchEngine.SGLANG,
    concurrency: Annotated[
        str, typer.Option(help="Levels of concurrent sessions, run one after the other.")
    ] = "1,4,8,16",
    scale: Annotated[
        float, typer.Option(min=0.02, help="1 is a prompt of 17,000 tokens, and needs a GPU.")
    ] = 0.1,
    arms: Annotated[
        str,
        typer.Option(help="Arms to compare; naive is SGLang's control, spliced without rotation."),
    ] = _ARMS,
    samples: Annotated[int, typer.Option(min=1, help="Minimum number of sessions per level.")] = 8,
    boundary: Annotated[
        int, typer.Option(min=0, help="Tokens after each seam to compute again.")
    ] = 0,
    checked: Annotated[
        int, typer.Option(min=0, help="Sessions per level whose answers are compared.")
    ] = 2,
    page_size: Annotated[
        int | None,
        typer.Option(
            help="Tokens per page: of the server, and of SGLang's reference \\[1, vLLM 32]."
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        KvDtype, typer.Option(help="KV of a started SGLang; the reference has fp32.")
    ] = KvDtype.AUTO,
    url: Annotated[
        str | None, typer.Option(help="A running server; without it, one starts on the CPU.")
    ] = None,
    api_key: ApiKey = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder or hub id, qwen3-next-tiny (recurrent layers) or mellum-tiny (windows); "
            "with --url, the model that computes the reference."
        ),
    ] = None,
    server_flag: ServerFlag = None,
    log: Annotated[
        Path | None,
        typer.Option(help="Log file of the server that is started \\[out/three_arm_ENGINE.log]."),
    ] = None,
    json_out: JsonOut = None,
    plot: Plot = None,
) -> None:
    """Edit one word of a long conversation and send it again: four ways, on one live server.

    off: nothing is reused. radix: exact prefixes. splice: Leyline. naive: the
    control, spliced without rotation. With --url, naive runs only where that
    server has the control (bench/README.md says how).

    \b
    The JSON: {CONCURRENCY: {ARM: figures, "floor": …, "goal": …, "edit": …}}.
    The figures are for the replay; "edit" holds the same figures for the edit
    before it. Tokens are means per request, times are in ms. "floor": as many
    new tokens as had to be prefilled, after a fully cached prefix. "kv_dtype":
    the dtype of the server's KV, as it says itself.

    \b
    logit_delta: the largest difference between the log probabilities of the arm
    and its reference, computed by the replay engine in fp32. For off and radix
    the reference is the prompt prefilled; for splice and naive it is the contract
    of amortize, which differs from a re-prefill. It covers the tokens that are in
    the top 20 of both, at the first generated token and at each later token while
    both chose the same. null: not compared, as for models with state per sequence,
    where what is copied ends at anchors.

    \b
    Example: leyline bench three-arm --concurrency 1,4 --json out/three_arm.json
    """
    from rich.console import Console

    from .measured import Measured
    from .report import draw, print_levels
    from .running import BenchOptions

    vllm = engine is BenchEngine.VLLM
    kept = kv_cache_dtype.value
    flags = tuple(server_flag or ())
    measured = Measured(url, api_key, model, flags, log, vllm=vllm, kv_dtype=kept).built()
    with reported("leyline bench", ValueError) as console:
        options = BenchOptions(
            _levels(concurrency),
            scale,
            _arms(arms, control=not vllm and (url is None or arms != _ARMS)),
            samples,
            boundary,
            checked,
            page_size or measured.default_page,
            rows=vllm,
        )
        with measured.serving(options) as address:
            levels = _measure(measured.client(address), options, console)
        if measured.has_reference:
            _compare(levels, model, options, console)
        document = {str(level.concurrency): level.to_json() for level in levels}
        if plot is not None:
            draw(document, plot)
    print_levels(Console(), document, f"three arms on {engine.value}, scale {scale:g}")
    write_json(json_out, document)


def _levels(text: str) -> tuple[int, ...]:
    levels = tuple(int(item) for item in text.split(","))
    if min(levels) < 1 or len(set(levels)) != len(levels):
        raise ValueError("name each concurrency once, for example: 1,4,8,16")
    return levels


def _arms(text: str, *, control: bool) -> frozenset[BenchArm]:
    from .figures import BenchArm

    chosen = frozenset(BenchArm(item.strip()) for item in text.split(","))
    return chosen if control else chosen - {BenchArm.NAIVE}


def _measure(client: BenchClient, options: BenchOptions, console: Console) -> list[Level]:
    from rich.progress import Progress

    from .running import run_bench

    async def measure(progress: Progress) -> list[Level]:
        task = progress.add_task("requests", total=options.requests())
        try:
            return await run_bench(client, options, lambda: progress.advance(task))
        finally:
            await client.close()

    with Progress(console=console) as progress:
        return asyncio.run(measure(progress))


def _compare(
    levels: Sequence[Level], model: str | None, options: BenchOptions, console: Console
) -> None:
    from rich.progress import Progress

    from leyline_proxy.upstream.embedded import EngineUnavailable

    from ..engines.process import shipped_model
    from .reference import Reference
    from .running import compare_with_reference

    if not options.checked:
        return
    try:
        reference = Reference(
            model or shipped_model(), options.reference_pool_tokens, options.page_tokens
        )
    except EngineUnavailable as error:
        console.print(f"no logit deltas: {error}", style="yellow", markup=False)
        return
    total = sum(len(level.cases[: options.checked]) for level in levels)
    with Progress(console=console) as progress:
        task = progress.add_task("reference", total=total)
        asyncio.run(
            compare_with_reference(levels, reference, options, lambda: progress.advance(task))
        )
