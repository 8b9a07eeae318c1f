"""Splices on a GPU: the fused kernel against copy bandwidth, and a real server with large pages.

The kernel is measured on the pool layouts of current models. With ``--model FOLDER``, SGLang is
started with pages of 64 tokens, and ``leyline bench three-arm`` runs against it. It needs an
environment with SGLang and Leyline. On a CPU it measures plain torch, which shows that it works and
nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import torch

from leyline_engine.rotary.rotation import Pairing, Rotary
from leyline_engine.rows.mover import PoolTensors
from leyline_engine.rows.pool import SplicePool

from ..console import write_json
from ..harness.arguments import Arguments
from ..harness.report import progress, show

GOAL = 0.8
"""Share of the device's copy bandwidth."""
_MOVED_BY = 700
_WARM_UP = 3
_START_LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Layout:
    """The rows of a model's KV pool on one tensor-parallel rank."""

    name: str
    layers: int
    heads: int
    key: int
    value: int
    """0: an MLA pool, whose key is the whole row."""
    band: int
    pairing: Pairing

    @property
    def start(self) -> int:
        """Return the first dimension that turns."""
        return self.key - self.band if self.value == 0 else 0


LAYOUTS = (
    Layout("DeepSeek-V3, Kimi-K2 (MLA)", 61, 1, 576, 0, 64, Pairing.INTERLEAVED),
    Layout("GLM-4.7-Flash (MLA)", 47, 1, 576, 0, 64, Pairing.INTERLEAVED),
    Layout("Llama-3.3-70B, TP 8", 80, 1, 128, 128, 128, Pairing.HALF_SPLIT),
    Layout("Qwen3-235B, TP 4", 94, 1, 128, 128, 128, Pairing.HALF_SPLIT),
    Layout("GLM-4.6, TP 8, half of the key turns", 92, 1, 128, 128, 64, Pairing.HALF_SPLIT),
    Layout("MiniMax-M2, TP 4, half of the key turns", 62, 2, 128, 128, 64, Pairing.HALF_SPLIT),
    Layout("Llama-3.1-8B", 32, 8, 128, 128, 128, Pairing.HALF_SPLIT),
)
DTYPES = {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}


def main() -> int:
    """Measure, print and write the figures; the exit status is 1 if a layout misses the goal."""
    parser = Arguments(__doc__)
    parser.add_argument("--rows", type=int, default=16_384, help="rows that are spliced")
    parser.add_argument("--repeat", type=int, default=20, help="timed repetitions")
    parser.add_argument("--model", help="also start a server of this model")
    parser.add_argument("--page-size", type=int, default=64, help="of that server")
    parser.add_argument("--kv-cache-dtype", default="auto", help="of that server")
    parser.add_argument("--port", type=int, default=30_000, help="of that server")
    parser.add_argument("flags", nargs="*", help="after --: more flags of that server")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU: says nothing of a GPU"
    figures: dict[str, dict[str, float]] = {}
    with progress("kernel", len(LAYOUTS) * len(DTYPES)) as step:
        for layout in LAYOUTS:
            for kind, dtype in DTYPES.items():
                found = measure(layout, dtype, given.rows, given.repeat, device)
                figures[f"{layout.name}, {kind}"] = found
                step()
    show(
        ("pool", "splice, ms", "copy, ms", "GB/s", "of copy bandwidth"),
        [
            (
                name,
                f"{each['splice_ms']:.2f}",
                f"{each['copy_ms']:.2f}",
                f"{each['gigabytes_per_s']:,.0f}",
                f"{each['share_of_copy_bandwidth']:.0%}",
            )
            for name, each in figures.items()
        ],
        title=f"{given.rows:,} rows, {name}",
        caption=f"goal: {GOAL:.0%} of a contiguous copy of as many bytes",
    )
    document: dict[str, Any] = {"device": name, "rows": given.rows, "kernel": figures}
    if given.model:
        document["three_arm"] = run_server(given)
    write_json(given.json, document)
    missed = any(each["share_of_copy_bandwidth"] < GOAL for each in figures.values())
    return int(device.type == "cuda" and missed)


def measure(
    layout: Layout, dtype: torch.dtype, rows: int, repeat: int, device: torch.device
) -> dict[str, float]:
    """Time splices of random rows, and a contiguous copy of as many bytes, in turns."""
    tensors = random_pool(layout, dtype, 2 * rows, device)
    inv_freq = 1.0 / 1e6 ** (torch.arange(0, layout.band, 2, dtype=torch.float32) / layout.band)
    # As-computed keys of all rows: none gives way, and each splice turns from one.
    pool = SplicePool(tensors, Rotary(inv_freq, layout.pairing), origins=2 * rows)
    order = torch.randperm(2 * rows).to(device) + 1
    source, target = order[:rows], order[rows:]
    count = rows * tensors.bytes_per_token
    block = torch.empty(count, dtype=torch.uint8, device=device)
    other = torch.empty_like(block)
    ways: tuple[Callable[[], object], ...] = (
        lambda: pool.splice(source, target, 2 * _MOVED_BY, _MOVED_BY),
        lambda: other.copy_(block),
    )
    times: list[list[float]] = [[], []]
    for turn in range(_WARM_UP + repeat):
        for way, seen in zip(ways, times, strict=True):
            seconds = timed(way, device)
            if turn >= _WARM_UP:
                seen.append(seconds)
    splice, copy = (median(each) for each in times)
    return {
        "splice_ms": 1e3 * splice,
        "copy_ms": 1e3 * copy,
        "gigabytes_per_s": 2 * count / splice / 1e9,
        "share_of_copy_bandwidth": copy / splice,
    }


def random_pool(
    layout: Layout, dtype: torch.dtype, slots: int, device: torch.device
) -> PoolTensors:
    """Return a pool of random rows, as SGLang lays it out; FP8 is held as bytes."""
    packed = dtype if dtype.itemsize == 1 else None

    def tensors(width: int) -> tuple[torch.Tensor, ...]:
        shape = (slots + 1, layout.heads, width)
        filled = (
            torch.empty(shape, device=device).normal_().to(dtype) for _ in range(layout.layers)
        )
        return tuple(each.view(torch.uint8) if packed else each for each in filled)

    return PoolTensors(
        pool_class="gqa" if layout.value else "mla_latent",
        keys=tensors(layout.key),
        values=tensors(layout.value) if layout.value else (),
        capacity=slots,
        rotary_start=layout.start,
        rotary_dim=layout.band,
        packed=packed,
    )


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that work takes, its kernels included."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def run_server(options: argparse.Namespace) -> dict[str, Any]:
    """Start SGLang with large pages, check that it splices, and run the three arms against it."""
    url = f"http://127.0.0.1:{options.port}"
    command = [
        *(sys.executable, "-P", "-m", "sglang.launch_server", "--model-path", options.model),
        *("--port", str(options.port), "--page-size", str(options.page_size)),
        *("--kv-cache-dtype", options.kv_cache_dtype),
        *("--radix-cache-backend", "leyline", "--enable-cache-report", *options.flags),
    ]
    out = Path("out") / "gpu_three_arm.json"
    server = subprocess.Popen(command)
    try:
        wait(url, server)
        leyline = [sys.executable, "-P", "-c", "from leyline_proxy.cli import main; main()"]
        subprocess.run([*leyline, "doctor", url], check=True)
        arms = ["bench", "three-arm", "--url", url, "--scale", "1", "--json", str(out)]
        subprocess.run([*leyline, *arms, "--page-size", str(options.page_size)], check=True)
    finally:
        server.terminate()
        server.wait(60)
    figures: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return figures


def wait(url: str, server: subprocess.Popen[bytes]) -> None:
    """Wait until a server is ready.

    Raises:
        RuntimeError: it ended, or took too long.
    """
    deadline = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            httpx.get(f"{url}/health_generate", timeout=30).raise_for_status()
            return
        except httpx.HTTPError:
            time.sleep(2)
    raise RuntimeError("the server isn't ready; see its output above")
