"""``leyline bench reuse`` on the replay engine: three engines over one model, in this process.

::

    full    nothing cached             its greedy tokens are fed to all others, as the answer
    live    reuse                ┐
    radix   exact prefixes only  ├     the same requests in the same order; nothing is evicted
    naive   reuse, not rotated   ┘

``live`` and ``radix`` take turns in being first, so that a busy machine slows both.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from leyline_engine.contract import (
    EditPayload,
    LineageRun,
    Receipt,
    ReuseMode,
    ReusePayload,
)
from leyline_engine.rotary.rotation import Rotary
from leyline_replay.engine import GenerationRequest, ReplayEngine
from leyline_replay.models.loader import load_model

from .figures import BenchRequest, Closeness, Sample
from .recovery import recoverable_tokens, tokens_by_arm
from .tenants import live_paths

SCOPE = "bench"
_LIVE = ReusePayload(mode=ReuseMode.LIVE)
_SPARE_SLOTS = 64


class ReplayReuseBench:
    """Measures requests on one model.

    Args:
        model: see :func:`~leyline_replay.models.loader.load_model`; computes in fp32.
        length: number of tokens that are generated for each request.

    Raises:
        ModelLoadError: the model can't be loaded.
    """

    def __init__(self, model: str | None, length: int) -> None:
        self._model = load_model(model, dtype="float32")
        self._length = length

    @property
    def name(self) -> str:
        """Name of the model."""
        return self._model.name

    def tokenise(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text separately, without special tokens."""
        encoded = self._model.tokenizer(list(texts), add_special_tokens=False)
        tokens: list[list[int]] = encoded["input_ids"]
        return tokens

    def measure(
        self, requests: Sequence[BenchRequest], advance: Callable[[], None]
    ) -> list[Sample]:
        """Serve requests one after the other, by every arm, from empty caches.

        Args:
            advance: called after each request.
        """
        longest = max(len(request.tokens) for request in requests) + self._length
        full = _Arm(self._engine(longest), None, retain=False)
        slots = sum(len(request.tokens) + self._length for request in requests)
        live, radix, naive = (_Arm(self._engine(slots), reuse) for reuse in (_LIVE, None, _LIVE))
        rotary = naive.engine.cache.pool.rotary
        naive.engine.cache.pool.rotary = Rotary.still(rotary.dim, rotary.pairing)
        samples = []
        for number, request in enumerate(requests):
            truth = full.run(request, self._length)
            full.engine.flush()
            cached = live_sequences(live.engine)
            timed = (live, radix) if number % 2 else (radix, live)
            runs = {arm: arm.run(request, self._length, truth.tokens) for arm in (*timed, naive)}
            samples.append(_sample(request, cached, truth, [runs[a] for a in (live, radix, naive)]))
            advance()
        return samples

    def _engine(self, slots: int) -> ReplayEngine:
        return ReplayEngine(self._model, pool_tokens=slots + _SPARE_SLOTS)


@dataclass(frozen=True, slots=True)
class _Run:
    """One request as an arm served it."""

    ttft_ms: float
    tokens: tuple[int, ...]
    """Generated, or forced."""
    logits: torch.Tensor
    """``[tokens, vocab]``: those that predict each token."""
    receipt: Receipt


class _Arm:
    """An engine, with the sessions that a proxy would keep for it."""

    def __init__(
        self, engine: ReplayEngine, reuse: ReusePayload | None, *, retain: bool = True
    ) -> None:
        self.engine = engine
        self._reuse = reuse
        self._retain = retain
        self._lineages: dict[str, tuple[LineageRun, ...]] = {}
        self._count = 0

    def run(self, request: BenchRequest, length: int, forced: Sequence[int] = ()) -> _Run:
        """Serve a request.

        Args:
            forced: tokens that are fed in place of the likeliest.
        """
        self._count += 1
        name, payload = f"r{self._count}", None
        if self._retain:
            lineage = self._lineages.get(request.session, ())
            payload = EditPayload(session=request.session, scope=SCOPE, turn=name, lineage=lineage)
        wanted = GenerationRequest(
            name, array("q", request.tokens), payload, self._reuse, max_new_tokens=length
        )
        started = time.perf_counter()
        sequence = self.engine.admit(wanted)
        logits = None
        while logits is None:
            logits = sequence.prefill_step()
        tokens = [int(logits.argmax())]
        ttft_ms = (time.perf_counter() - started) * 1000
        tokens[:1] = forced[:1] or tokens
        rows = [logits]
        while len(rows) < length:
            rows.append(sequence.decode_step(tokens[-1]))
            tokens.append(forced[len(tokens)] if forced else int(rows[-1].argmax()))
        receipt = sequence.finish(tokens[-1]).receipt
        self._lineages[request.session] = receipt.lineage
        return _Run(ttft_ms, tuple(tokens), torch.stack(rows), receipt)


def live_sequences(engine: ReplayEngine) -> list[array[int]]:
    """Return the token ids of all sequences in an engine's radix tree, whatever its index knows."""
    return [tokens for tokens, _ in live_paths(engine.cache.tree)]


def compare(full: torch.Tensor, other: torch.Tensor) -> Closeness:
    """Compare logits ``[tokens, vocab]`` with those of the full prefill."""
    expected, found = (logits.double().log_softmax(-1) for logits in (full, other))
    kl = (expected.exp() * (expected - found)).sum(-1)
    equal = full.argmax(-1) == other.argmax(-1)
    return Closeness(tuple(kl.clamp(min=0).tolist()), tuple(equal.tolist()))


def _sample(
    request: BenchRequest, cached: Sequence[array[int]], truth: _Run, runs: Sequence[_Run]
) -> Sample:
    live, radix, naive = runs
    counts = live.receipt.tokens
    return Sample(
        prompt=counts.prompt,
        prefix=counts.prefix,
        reused=counts.reused,
        recoverable=recoverable_tokens(cached, request.tokens, counts.prefix),
        arms=tokens_by_arm(cached, request.tokens, counts.prefix),
        radix_prefix=radix.receipt.tokens.prefix,
        live_ms=live.ttft_ms,
        radix_ms=radix.ttft_ms,
        live=compare(truth.logits, live.logits),
        naive=compare(truth.logits, naive.logits),
        naive_reused=naive.receipt.tokens.reused,
    )
