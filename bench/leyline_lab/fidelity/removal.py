"""Removal, bit by bit: a cache that forgot a span against one that never saw it.

::

    seen    P │ P S │         P R      the span S is sent, then forgotten
    never   P │               P R

    seen    P │ P S M │       P M R    or after M was computed in sight of it
    never   P │               P M R

Both engines compute P in the same forwards, and what follows in the same forwards again, one
request at a time. So the logits of the prompt and of every decoded token must be equal to the last
bit. The control amortizes the second edit: then M remembers S, and the difference must not be zero.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from random import Random

import torch

from leyline_engine.contract import (
    Directive,
    EditPayload,
    LineageRun,
    Mode,
    SourceRef,
    SpanLabel,
    token_digest,
)
from leyline_lab.fidelity.experiment import Record, ResultTable, Scale
from leyline_replay.engine import GenerationRequest, ReplayEngine
from leyline_replay.models.loader import LoadedModel

DECODED = 64
_KINDS = ("before", "middle", "control")
_DTYPES = ("float32", "bfloat16")
_SMALL = 200_000_000
"""Weights of a model that is measured in both."""
_SEEDS = {Scale.QUICK: 1, Scale.FULL: 10}
_PREFIX, _SPAN, _MIDDLE, _REST = 96, 40, 64, 24
_SCOPE, _SESSION = "removal", "s"


@dataclass(frozen=True, slots=True)
class _Texts:
    """The parts of a prompt, in tokens."""

    prefix: array[int]
    span: array[int]
    middle: array[int]
    rest: array[int]


class Removal:
    """One case is a model, a kind of edit, a dtype, and a seed.

    Args:
        models: models by name; each computes in fp32 and in bf16, large ones in their own dtype.
    """

    name = "removal"
    title = "Removal"

    def __init__(self, models: Iterable[LoadedModel]) -> None:
        self._models = {model.name: model for model in models}
        self._cast: tuple[str, str, LoadedModel] | None = None

    def cases(self, scale: Scale) -> Sequence[str]:
        """Return all models, kinds and dtypes with each seed."""
        return [
            f"{kind}/{dtype}/{seed}/{name}"
            for name, model in self._models.items()
            for dtype in _dtypes(model)
            for seed in range(_SEEDS[scale])
            for kind in _KINDS
        ]

    def measure(self, case: str) -> Record:
        """Return the largest difference of any logit, and how many tokens were decoded."""
        kind, dtype, seed, name = case.split("/", 3)
        model = self._in(dtype, name)
        texts = _draw(model, int(seed))
        seen, erased = _seen(model, texts, kind)
        never = _never(model, texts, kind)
        return {
            "difference": float((seen - never).abs().max()),
            "decoded": len(seen) - 1,
            "erased": erased,
        }

    def table(self, records: Mapping[str, Record]) -> ResultTable:
        """Return a row for each kind and dtype: the largest difference of all seeds."""
        worst: dict[tuple[str, str, str], list[float]] = {}
        least: dict[str, float] = {}
        for case, record in records.items():
            kind, dtype, _, name = case.split("/", 3)
            found = float(record["difference"] or 0.0)
            worst.setdefault((name, kind, dtype), []).append(found)
            least[kind] = min(found, least.get(kind, found))
        removed = max(
            (max(found) for (_, kind, _), found in worst.items() if kind != "control"), default=0.0
        )
        verdict = (
            "Removal is exact: no logit differs by a single bit"
            if removed == 0.0
            else f"Removal is NOT exact: a logit differs by {removed:.1e}"
        )
        return ResultTable(
            title=self.title,
            question="Is a cache that forgot a span the cache of an engine that never saw it?",
            columns=("model", "edit", "dtype", "prompts", "largest difference of any logit"),
            rows=tuple(
                (name, _NAMES[kind], dtype, len(found), max(found))
                for (name, kind, dtype), found in worst.items()
            ),
            finding=(
                f"{verdict}, over the prompt's last token and {DECODED} decoded ones. With "
                "amortize, which keeps what was computed after the span, every prompt differs "
                f"(by {least.get('control', 0.0):.1e} at least)."
            ),
        )

    def _in(self, dtype: str, name: str) -> LoadedModel:
        """Return a model in a dtype; the last one is kept, as the next case mostly wants it."""
        if self._cast is None or self._cast[:2] != (dtype, name):
            loaded = self._models[name]
            cast = deepcopy(loaded.model).to(getattr(torch, dtype))
            self._cast = (dtype, name, replace(loaded, model=cast))
        return self._cast[2]


def _dtypes(loaded: LoadedModel) -> tuple[str, ...]:
    """Return the dtypes in which a model is measured."""
    weights = sum(parameter.numel() for parameter in loaded.model.parameters())
    own = str(loaded.model.dtype).removeprefix("torch.")
    return _DTYPES if weights <= _SMALL else (own,)


_NAMES = {
    "before": "forgotten before anything follows it",
    "middle": "forgotten in the middle",
    "control": "amortized in the middle (control)",
}


def _draw(model: LoadedModel, seed: int) -> _Texts:
    chance = Random(f"removal {seed}")
    vocabulary = int(model.model.config.vocab_size)

    def some(count: int) -> array[int]:
        return array("q", (chance.randrange(16, vocabulary) for _ in range(count)))

    return _Texts(some(_PREFIX), some(_SPAN), some(_MIDDLE), some(_REST))


def _seen(model: LoadedModel, texts: _Texts, kind: str) -> tuple[torch.Tensor, int]:
    """Return logits ``[1 + decoded, vocab]`` after the span was sent and taken out again."""
    engine = _engine(model)
    _run(engine, texts.prefix, EditPayload(session=_SESSION, scope=_SCOPE, turn="prefix"), 0)
    middle = texts.middle if kind != "before" else array("q")
    told = texts.prefix + texts.span + middle
    labels = (
        SpanLabel("prefix", 0, _PREFIX),
        SpanLabel("span", _PREFIX, _PREFIX + _SPAN),
        SpanLabel("middle", _PREFIX + _SPAN, len(told)),
    )
    _run(engine, told, EditPayload(session=_SESSION, scope=_SCOPE, turn="told", spans=labels), 0)
    mode = Mode.AMORTIZE if kind == "control" else Mode.FORGET
    payload = EditPayload(
        session=_SESSION,
        scope=_SCOPE,
        turn="removed",
        sources=(SourceRef("told", len(told), token_digest(told)),),
        directives=(Directive(_PREFIX, _PREFIX + _SPAN, (), mode),),
        lineage=_lineage(engine, "told"),
    )
    return _run(engine, texts.prefix + middle + texts.rest, payload, DECODED)


def _never(model: LoadedModel, texts: _Texts, kind: str) -> torch.Tensor:
    """Return the same logits of an engine that the span was never sent to."""
    engine = _engine(model)
    _run(engine, texts.prefix, EditPayload(session=_SESSION, scope=_SCOPE, turn="prefix"), 0)
    middle = texts.middle if kind != "before" else array("q")
    prompt = texts.prefix + middle + texts.rest
    payload = EditPayload(session=_SESSION, scope=_SCOPE, turn="removed")
    return _run(engine, prompt, payload, DECODED)[0]


def _engine(model: LoadedModel) -> ReplayEngine:
    return ReplayEngine(model, pool_tokens=2048)


def _lineage(engine: ReplayEngine, turn: str) -> tuple[LineageRun, ...]:
    source = engine.cache.registry.get((_SCOPE, _SESSION), turn)
    return source.lineage if source is not None else ()


def _run(
    engine: ReplayEngine, prompt: array[int], payload: EditPayload, decoded: int
) -> tuple[torch.Tensor, int]:
    """Return fp32 logits ``[1 + decoded, vocab]`` of greedy decoding, and how much was erased."""
    wanted = GenerationRequest(payload.turn, prompt, payload, max_new_tokens=decoded + 1)
    sequence = engine.admit(wanted)
    logits = None
    while logits is None:
        logits = sequence.prefill_step()
    rows = [logits]
    for _ in range(decoded):
        rows.append(sequence.decode_step(int(rows[-1].argmax())))
    receipt = sequence.finish(None).receipt
    erased = receipt.forgot.overwritten if receipt.forgot is not None else 0
    return torch.stack(rows), erased
