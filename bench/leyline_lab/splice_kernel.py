"""``leyline bench splice-kernel``: splicing rows of a KV pool against copying and prefilling them.

The pool has the layout that SGLang gives it for a model, and holds random rows. The model itself
is run to see what prefilling as many tokens takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress

from .console import reported, write_json
from .harness.report import show
from .harness.statistics import median_interval
from .options import JsonOut

if TYPE_CHECKING:
    import torch

    from leyline_engine.rows.mover import PoolTensors
    from leyline_replay.cache.pool import KVLayout
    from leyline_replay.models.loader import LoadedModel

_FIRST, _LAST = 1024, 65_536
_WARM_UP = 2
_MOVED_BY = 700
_CHUNK = 512
"""Tokens per prefill step, as in the engines."""
_PIECE = 2048
"""Rows per gather and scatter of the floor: as many as stay in a CPU's cache."""
_PREFILL_PATIENCE = 3.0
"""Seconds; where a prefill takes longer, the times of more tokens are extrapolated."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds: the median of the repetitions, and the 95 % interval of that median."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Result:
    """The times of one length, in µs."""

    splice_us: float
    copy_us: float
    """Copying the same rows as SGLang does, ``kv[target] = kv[source]`` per layer."""
    prefill_us: float
    ratio_to_copy: float
    bytes: int
    """Size of the rows, over all layers."""
    splice_us_95: tuple[float, float]
    copy_us_95: tuple[float, float]
    floor_us: float
    """The fastest copy of these rows that torch has: gathered and scattered in pieces."""
    prefill_measured: bool
    """False if the time was extrapolated from the model's prefill of fewer tokens."""


def command(
    *,
    json_out: JsonOut = None,
    max_tokens: Annotated[
        int, typer.Option(min=_FIRST, help="Longest run of rows; lengths double from 1,024.")
    ] = _LAST,
    repeat: Annotated[int, typer.Option(min=6, help="Timed repetitions per length.")] = 15,
    model: Annotated[
        str | None, typer.Option(help="Model folder or hub id; a tiny model by default.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, … or auto.")] = "auto",
) -> None:
    """Splice rows of a KV pool, and compare with a plain copy of them and with prefilling them.

    Splice and copy alternate, so that a busy machine slows both. The goal is a splice within
    twice the time of a copy.
    """
    import torch

    from leyline_replay.models.loader import ModelLoadError, load_model
    from leyline_replay.models.rotary_probe import UnsupportedModelError

    with reported("leyline bench", ModelLoadError, UnsupportedModelError) as console:
        loaded = load_model(model, dtype=dtype, device=device)
        with Progress(console=console) as progress:
            results = run(loaded, max_tokens, repeat, progress)
    where = f"{loaded.model.device}, {torch.get_num_threads()} CPU threads"
    _print_table(results, f"{loaded.name}, {loaded.model.dtype}, {where}")
    write_json(json_out, {str(length): asdict(result) for length, result in results.items()})


def run(loaded: LoadedModel, max_tokens: int, repeat: int, progress: Progress) -> dict[int, Result]:
    """Measure every length up to ``max_tokens``.

    Raises:
        UnsupportedModelError: the model's KV has no form that could be spliced.
    """
    from leyline_engine.rows.pool import SplicePool
    from leyline_replay.models.rotary_probe import UnsupportedModelError, read_model_facts

    facts = read_model_facts(loaded.model)
    if facts.unsupported:
        raise UnsupportedModelError(facts.unsupported)
    lengths = [_FIRST << step for step in range((max_tokens // _FIRST).bit_length())]
    task = progress.add_task("prefill", total=len(lengths) * (repeat + 1))
    prefills = _prefill_times(loaded, lengths, lambda: progress.advance(task))
    results = {}
    for length in lengths:
        progress.update(task, description=f"{length:,} rows")
        tensors = random_pool(facts.layout, 2 * length, loaded.model.device)
        pool = SplicePool(tensors, facts.rotary)
        splice, copy, floor = _compare(
            pool, length, repeat, loaded.model.device, lambda: progress.advance(task)
        )
        prefill_us, measured = prefills[length]
        results[length] = Result(
            splice_us=splice.median,
            copy_us=copy.median,
            prefill_us=prefill_us,
            ratio_to_copy=splice.median / copy.median,
            bytes=length * tensors.bytes_per_token,
            splice_us_95=(splice.low, splice.high),
            copy_us_95=(copy.low, copy.high),
            floor_us=floor.median,
            prefill_measured=measured,
        )
    return results


def random_pool(layout: KVLayout, slots: int, device: torch.device) -> PoolTensors:
    """Return a pool in SGLang's layout, with ``slots`` random rows."""
    import torch

    from leyline_engine.rows.mover import PoolTensors

    def tensors(heads: int, dim: int) -> tuple[torch.Tensor, ...]:
        shape = (slots + 1, heads, dim)
        return tuple(
            torch.empty(shape, dtype=layout.dtype, device=device).normal_()
            for _ in range(layout.layers)
        )

    (heads, dim), (other_heads, other_dim) = layout.shapes[0]
    latent = layout.pool_class == "mla_latent"
    return PoolTensors(
        pool_class=layout.pool_class,
        keys=tensors(heads, dim + other_dim if latent else dim),
        values=() if latent else tensors(other_heads, other_dim),
        rotary_start=dim if latent else layout.rotary_start,
        rotary_dim=layout.rotary_dim,
        capacity=slots,
    )


def _compare(
    pool: Any, length: int, repeat: int, device: torch.device, advance: Callable[[], None]
) -> tuple[Timing, Timing, Timing]:
    """Time the splice, the copy and the floor for ``length`` rows in random order, in turns."""
    import torch

    tensors: PoolTensors = pool.tensors
    order = torch.randperm(2 * length).to(device) + 1
    source, target = order[:length], order[length:]
    every = (*tensors.keys, *tensors.values)

    def splice() -> None:
        pool.splice(source, target, 2 * _MOVED_BY, _MOVED_BY)

    def copy() -> None:
        for tensor in every:
            tensor[target] = tensor[source]

    def gather_scatter() -> None:
        for tensor in every:
            for start in range(0, length, _PIECE):
                some, others = source[start : start + _PIECE], target[start : start + _PIECE]
                tensor.index_copy_(0, others, tensor.index_select(0, some))

    ways = (splice, copy, gather_scatter)
    times: list[list[float]] = [[] for _ in ways]
    for turn in range(_WARM_UP + repeat):
        for way, seen in zip(ways, times, strict=True):
            seconds = _timed(way, device)
            if turn >= _WARM_UP:
                seen.append(1e6 * seconds)
        if turn >= _WARM_UP:
            advance()
    first, second, third = (Timing(*median_interval(seen)) for seen in times)
    return first, second, third


def _timed(work: Callable[[], None], device: torch.device) -> float:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _prefill_times(
    loaded: LoadedModel, lengths: list[int], advance: Callable[[], None]
) -> dict[int, tuple[float, bool]]:
    """Return the microseconds to prefill each length, and True where that was measured.

    Lengths too slow to run are extrapolated: ``a·L + b·L²`` through the last two measured.
    """
    import torch

    seen: dict[int, float] = {}
    found: dict[int, tuple[float, bool]] = {}
    generator = torch.Generator().manual_seed(1)
    limit = int(getattr(loaded.model.config, "max_position_embeddings", lengths[-1]))
    shorter = lengths[0] // 2
    for length in (shorter, *lengths):
        if length <= limit and (not seen or max(seen.values()) < _PREFILL_PATIENCE):
            tokens = torch.randint(
                int(loaded.model.config.vocab_size), (1, length), generator=generator
            ).to(loaded.model.device)
            seen[length] = min(_prefill(loaded, tokens) for _ in range(2))
            found[length] = (1e6 * seen[length], True)
        else:
            found[length] = (1e6 * _extrapolate(seen, length), False)
        if length != shorter:
            advance()
    return found


def _prefill(loaded: LoadedModel, tokens: torch.Tensor) -> float:
    import torch
    from transformers import DynamicCache

    def forward() -> None:
        cache = DynamicCache(config=loaded.model.config)
        with torch.inference_mode():
            for start in range(0, tokens.shape[1], _CHUNK):
                loaded.model(
                    input_ids=tokens[:, start : start + _CHUNK],
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )

    return _timed(forward, loaded.model.device)


def _extrapolate(seen: dict[int, float], length: int) -> float:
    """Seconds for ``length`` by the parabola through zero and the two longest that were run."""
    if len(seen) < 2:
        known, seconds = next(iter(seen.items()))
        return seconds * length / known
    (x1, y1), (x2, y2) = sorted(seen.items())[-2:]
    curve = max(0.0, (y2 / x2 - y1 / x1) / (x2 - x1))
    return length * (y2 / x2 + curve * (length - x2))


def _print_table(results: dict[int, Result], title: str) -> None:
    def interval(median: float, ends: tuple[float, float]) -> str:
        low, high = ends
        return f"{median / 1e3:,.2f} [{low / 1e3:,.2f}, {high / 1e3:,.2f}]"

    rows = [
        (
            f"{length:,}",
            interval(result.splice_us, result.splice_us_95),
            interval(result.copy_us, result.copy_us_95),
            f"{result.ratio_to_copy:.2f}",
            f"{result.floor_us / 1e3:,.2f}",
            f"{'' if result.prefill_measured else '~'}{result.prefill_us / 1e6:,.2f} s",
            f"{result.prefill_us / result.splice_us:,.0f}",
        )
        for length, result in results.items()
    ]
    columns = ("rows", "splice, ms", "copy, ms", "ratio", "floor, ms", "prefill", "gain")
    caption = "medians [95 %]; ~ extrapolated; floor: the fastest copy of these rows"
    show(columns, rows, title=title, caption=caption, words=0)
