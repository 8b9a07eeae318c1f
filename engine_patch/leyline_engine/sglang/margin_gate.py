"""The margin gate in SGLang: a session whose reuse isn't trusted computes its next turn itself.

SGLang samples on the device, and a prefill can't be undone once its logits are known. So the gate
judges a turn when SGLang itself reads the result. If the margin is too small, the answer goes out
as it is, but nothing that has read what was reused stays in the cache, and the session is marked.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from leyline_engine.records.publications import Publication
from leyline_engine.records.sources import SessionKey
from leyline_engine.reuse.margin import measured, top_margins
from leyline_engine.scheduler.containment import contained
from leyline_engine.sglang.forgetting import Forgetter
from leyline_engine.sglang.publishing import KeptOut
from leyline_engine.sglang.turn import Phase, Turn

log = logging.getLogger(__name__)

MAX_MARKED = 1024
"""Marked sessions; as many as have retained turns."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A margin on its way from the device."""

    values: torch.Tensor
    """fp32 ``[n]`` on the CPU; valid once ``ready`` has happened."""
    row: int
    ready: Any = None
    """Event of the stream that copies; None if nothing is copied."""

    def value(self) -> float | None:
        """Wait for the margin, and return it; None if it is no finite number."""
        if self.ready is not None:
            self.ready.synchronize()
        return measured(float(self.values[self.row]))


def note_margins(batch: Any, logits: torch.Tensor | None) -> None:
    """Note the margins of turns whose prefill ends with a batch. Nothing waits for the device.

    Args:
        batch: SGLang's batch; None if the forward has none of its own.
        logits: ``[n, vocab]`` by request, before any sampling parameter changes them.
    """
    if batch is None or logits is None or not batch.forward_mode.is_extend():
        return
    ending = [(i, req) for i, req in enumerate(batch.reqs) if _ends_prefill(req)]
    if not ending:
        return
    # A list as an index would be copied to the device, and waited for.
    values, ready = _to_cpu(top_margins(torch.stack([logits[i] for i, _ in ending])))
    for row, (_, req) in enumerate(ending):
        req.leyline.reading = Reading(values, row, ready)


def _ends_prefill(req: Any) -> bool:
    """Return True if a row computes the last token of a prompt whose margin is wanted."""
    turn = getattr(req, "leyline", None)
    return (
        turn is not None
        and turn.req is req
        and _waits(turn)
        and req.extend_end == len(req.origin_input_ids)
    )


def _waits(turn: Turn) -> bool:
    """Return True if a turn copied for reuse, runs, and wasn't judged yet."""
    asked, receipt = turn.reuse, turn.receipt
    if asked is None or not asked.margin or receipt is None or not receipt.tokens.reused:
        return False
    return turn.phase is Phase.RUNNING and not turn.judged


def _to_cpu(values: torch.Tensor) -> tuple[torch.Tensor, Any]:
    if values.device.type == "cpu":
        return values, None
    copied = values.to("cpu", non_blocking=True)
    ready = torch.get_device_module(values.device).Event()
    ready.record()
    return copied, ready


class Marks:
    """Sessions whose next turn runs without reuse. The tenant with the most loses its oldest.

    Args:
        limit: the maximum number of sessions.
    """

    def __init__(self, limit: int = MAX_MARKED) -> None:
        self._limit = limit
        self._tenants: dict[str, OrderedDict[str, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, session: object) -> bool:
        match session:
            case (str(scope), str(name)):
                return name in self._tenants.get(scope, ())
            case _:
                return False

    def add(self, session: SessionKey) -> None:
        """Mark a session."""
        self.discard(session)
        scope, name = session
        self._tenants.setdefault(scope, OrderedDict())[name] = None
        self._count += 1
        if self._count > self._limit:
            # The first of equal ones, on every rank.
            most = max(self._tenants, key=lambda each: len(self._tenants[each]))
            self.discard((most, next(iter(self._tenants[most]))))

    def discard(self, session: SessionKey | None) -> None:
        """Take a mark away, if there is one."""
        if session is None or session not in self:
            return
        scope, name = session
        del self._tenants[scope][name]
        self._count -= 1
        if not self._tenants[scope]:
            del self._tenants[scope]

    def clear(self) -> None:
        """Take all marks away."""
        self._tenants.clear()
        self._count = 0


class MarginGate:
    """The gate of one scheduler.

    Args:
        forgetter: removes what isn't trusted.
        kept_out: takes requests that must not publish.
        agree: returns True if all tensor-parallel ranks say True.
    """

    def __init__(
        self, forgetter: Forgetter, *, kept_out: KeptOut, agree: Callable[[bool], bool]
    ) -> None:
        self.marks = Marks()
        self._forgetter = forgetter
        self._kept_out = kept_out
        self._agree = agree

    def judge(self, reqs: Iterable[Any]) -> None:
        """Judge the turns of a batch whose prefill has ended, now that SGLang reads its result."""
        for req in reqs:
            turn = getattr(req, "leyline", None)
            if turn is None or turn.req is not req or not _waits(turn):
                continue
            if req.inflight_middle_chunks > 0 or req.is_retracted or req.finished():
                continue
            turn.judged = True
            margin = _read(turn)
            # Every rank votes on the same turns, whether or not it could read.
            if not self._agree(margin is None or margin >= turn.reuse.margin):
                self._distrust(turn)
            receipt = turn.receipt
            reuse = msgspec.structs.replace(receipt.reuse, margin=margin)
            turn.receipt = msgspec.structs.replace(receipt, reuse=reuse)

    def _distrust(self, turn: Turn) -> None:
        """Let nothing that has read a turn's reused content stay cached, and mark its session."""
        if turn.session is not None:
            self.marks.add(turn.session)
        self._kept_out.add(turn.req)
        start = _first_reused(turn)
        with contained("removing what isn't trusted"):
            path = Publication(turn.keys(turn.req.origin_input_ids), turn.lineage, turn.space)
            self._forgetter.remove(path, start)


def _read(turn: Turn) -> float | None:
    reading, turn.reading = turn.reading, None
    try:
        return None if reading is None else reading.value()
    except Exception:
        log.exception("a margin could not be read; its turn is trusted")
        return None


def _first_reused(turn: Turn) -> int:
    """Return the first position of a turn's prompt that was copied for reuse."""
    plan = turn.plan
    if plan is None or not plan.kinds:
        return 0
    reused = (copy.dest for copy in plan.copies if plan.kinds[copy.source] is not None)
    return min(reused, default=0)
