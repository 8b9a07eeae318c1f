"""A plugin of the tests' own that a real SGLang server loads: it looks into the KV pool.

It acts on requests that ask for it in ``custom_params`` and leaves all others alone:

* ``probe_rows``: a file that takes the rows of the request's tokens, in position order, whenever
  they become matchable; the last of these is at its end.
* ``probe_watch``: an earlier such file; what its slots hold by then is written as well.
* ``probe_rotary``: from this request on, splices turn keys in this way, one of :data:`TURNS`.

It also logs each step in which rows decode beside a stage row, as :data:`MIXED`.

:func:`probe_environment` makes a server load it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from leyline_engine.rotary.rotation import Rotary

ROWS, WATCH, ROTARY = "probe_rows", "probe_watch", "probe_rotary"

MIXED = "leyline probe: decodes beside a stage row"

_ENTRY_POINTS = "[sglang.srt.plugins]\nleyline_pool_probe = pool_probe:register\n"
_METADATA = "Metadata-Version: 2.1\nName: leyline-pool-probe\nVersion: 0\n"
_WRONG_BASE = 500_000.0


@dataclass(frozen=True, slots=True)
class Rows:
    """The content of a pool's slots; one tensor per layer."""

    slots: torch.Tensor
    """int64 ``[n]``."""
    keys: tuple[torch.Tensor, ...]
    """``[n, heads, dim]``; MLA: latent and rotary key."""
    values: tuple[torch.Tensor, ...]
    """``[n, heads, dim]``; empty for MLA."""
    rotary_start: int
    """The key's dimensions from here on turn with position."""

    @property
    def turning(self) -> tuple[torch.Tensor, ...]:
        """The rotary part of each layer's keys."""
        return tuple(keys[..., self.rotary_start :] for keys in self.keys)

    @property
    def still(self) -> tuple[torch.Tensor, ...]:
        """The part that doesn't turn: MLA's latents, or values."""
        return self.values or tuple(keys[..., : self.rotary_start] for keys in self.keys)


def probe_environment(folder: Path) -> dict[str, str]:
    """Environment of a server that loads the probe.

    Args:
        folder: an empty one, for the files that register the plugin with SGLang.
    """
    record = folder / "leyline_pool_probe-0.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text(_METADATA)
    (record / "entry_points.txt").write_text(_ENTRY_POINTS)
    path = [str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(part for part in path if part)}


def read_rows(file: Path) -> Rows:
    """Rows of a request that named ``file`` as ``probe_rows``."""
    return Rows(**torch.load(file)["rows"])


def read_watched(file: Path, *, drafts: bool = False) -> Rows:
    """The content of ``probe_watch``'s slots when ``file`` was written."""
    return Rows(**torch.load(file)["watched_drafts" if drafts else "watched"])


def read_drafts(file: Path) -> Rows:
    """Rows of the draft model's pool, in the same slots."""
    return Rows(**torch.load(file)["drafts"])


def register() -> None:
    """Entry point: hook this process's scheduler, if it is one."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.managers.scheduler.Scheduler._create_generation_req"
    HookRegistry.register(target, _receive, HookType.AROUND)
    target = "sglang.srt.managers.schedule_batch.ScheduleBatch.mix_with_running"
    HookRegistry.register(target, _mix, HookType.AROUND)


def _receive(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    req = original(self, *args, **kwargs)
    wishes = req.sampling_params.custom_params or {}
    if ROTARY in wishes:
        _turn_wrongly(self.tree_cache, wishes[ROTARY])
    if ROWS in wishes and "checkpoint" not in vars(self.tree_cache):
        self.tree_cache.checkpoint = _writing(self.tree_cache)
    return req


def _mix(original: Callable[..., Any], self: Any, running: Any) -> Any:
    from leyline_engine.sglang.stage_row import StageRow

    if any(isinstance(req, StageRow) for req in self.reqs):
        logging.getLogger(__name__).warning("%s", MIXED)
    return original(self, running)


def _writing(cache: Any) -> Callable[..., None]:
    """A tree cache's ``checkpoint`` that writes down the rows of requests that ask for it."""
    checkpoint = cache.checkpoint

    def write_and_checkpoint(req: Any, *, up_to: int, **kwargs: Any) -> None:
        wishes = req.sampling_params.custom_params or {}
        if ROWS in wishes:
            slots = cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :up_to]
            written = {"rows": _rows_at(cache, slots.long())}
            for draft in cache._pool.drafts:
                written["drafts"] = _rows_at(cache, slots.long(), draft)
            if WATCH in wishes:
                watched = read_rows(Path(wishes[WATCH])).slots
                written["watched"] = _rows_at(cache, watched)
                for draft in cache._pool.drafts:
                    written["watched_drafts"] = _rows_at(cache, watched, draft)
            torch.save(written, wishes[ROWS])
        checkpoint(req, up_to=up_to, **kwargs)

    return write_and_checkpoint


def _rows_at(cache: Any, slots: torch.Tensor, pool: Any = None) -> dict[str, Any]:
    tensors = (pool or cache._pool).tensors
    return {
        "slots": slots.clone(),
        "keys": tuple(keys[slots] for keys in tensors.keys),
        "values": tuple(values[slots] for values in tensors.values),
        "rotary_start": tensors.rotary_start,
    }


def _turn_wrongly(cache: Any, how: str) -> None:
    from dataclasses import replace

    from leyline_engine.rotary.rotation import LayeredRotary
    from leyline_engine.rows.mover import TorchMover

    pool = cache._pool
    right = getattr(pool, "probe_right", pool.rotary)
    pool.probe_right = right
    turn = TURNS[how]
    pool.rotary = (
        replace(right, distinct=tuple(turn(each) for each in right.distinct))
        if isinstance(right, LayeredRotary)
        else turn(right)
    )
    pool._mover = TorchMover(pool.tensors, pool.rotary)


def _off_by_one(right: Rotary) -> Rotary:
    from leyline_engine.rotary.rotation import Rotary

    class OffByOne(Rotary):
        """Turns keys one position too far."""

        def turns(
            self, computed_at: torch.Tensor, needed_at: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return Rotary.turns(self, computed_at, needed_at + 1)

    return OffByOne(right.inv_freq, right.pairing)


def _with_frequencies(right: Rotary, frequencies: torch.Tensor) -> Rotary:
    from dataclasses import replace

    return replace(right, inv_freq=frequencies.to(right.inv_freq))


def _other_pairing(right: Rotary) -> Rotary:
    from dataclasses import replace

    from leyline_engine.rotary.rotation import Pairing

    (other,) = set(Pairing) - {right.pairing}
    return replace(right, pairing=other)


def _of_base(width: int) -> torch.Tensor:
    return 1.0 / _WRONG_BASE ** (torch.arange(0, width, 2).double() / width)


TURNS: dict[str, Callable[[Rotary], Rotary]] = {
    "right": lambda right: right,
    "no_rotation": lambda right: _with_frequencies(right, 0 * right.inv_freq),
    "wrong_sign": lambda right: _with_frequencies(right, -right.inv_freq),
    "wrong_base": lambda right: _with_frequencies(right, _of_base(right.dim)),
    "wrong_pairing": _other_pairing,
    "off_by_one": _off_by_one,
}
"""Ways in which a server's splices can be made to turn keys; all but the first are wrong."""
