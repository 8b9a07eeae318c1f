"""Driving the replay engine through its public interface, and tampering with it from outside."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from oracle_models import OracleModel

from leyline_engine.contract import (
    CopySegment,
    Directive,
    EditPayload,
    LineageRun,
    LiteralSegment,
    Mode,
    Receipt,
    RecurrentEdits,
    Segment,
    SourceRef,
    lower_directives,
    token_digest,
)
from leyline_replay.cache.slots import Slots
from leyline_replay.engine import GenerationRequest, ReplayEngine
from leyline_replay.models.loader import LoadedModel

Edit = tuple[int, int, tuple[int, ...]]
"""(start, end, replacement) in the source's coordinates."""

POOL_TOKENS = 4096


class Treatment(StrEnum):
    """The treatment of the KV after an edit."""

    AMORTIZE = "amortize"
    FORGET = "forget"
    EXACT = "exact"
    """The edit is undeclared: from it on the prompt is prefilled unchanged."""


@dataclass(frozen=True, slots=True)
class Ran:
    """One turn as the engine ran it."""

    turn: str
    tokens: tuple[int, ...]
    """Prompt and generated tokens, the unfed one included."""
    logits: tuple[torch.Tensor, ...]
    """Of the last prompt token, then of each forced token."""
    receipt: Receipt


def start_engine(
    subject: OracleModel, chunk_tokens: int = 128, *, page_tokens: int = 1, **options: Any
) -> ReplayEngine:
    """A fresh engine over a model."""
    no_tokenizer: Any = None
    loaded = LoadedModel(
        name=subject.name, model=subject.model, tokenizer=no_tokenizer, fingerprint="f", path=""
    )
    return ReplayEngine(
        loaded,
        pool_tokens=POOL_TOKENS,
        page_tokens=page_tokens,
        kv_dtype=subject.kv_dtype,
        chunk_tokens=chunk_tokens,
        **options,
    )


def run_request(
    engine: ReplayEngine,
    prompt: Sequence[int],
    forced: Sequence[int] = (),
    unfed: int | None = None,
    payload: EditPayload | None = None,
) -> Ran:
    """Run one request to its end, feeding ``forced`` tokens whatever the model would say."""
    name = payload.turn if payload is not None else "plain"
    sequence = engine.admit(GenerationRequest(name, array("q", prompt), payload))
    logits = None
    while logits is None:
        logits = sequence.prefill_step()
    answers = [logits, *(sequence.decode_step(token) for token in forced)]
    record = sequence.finish(unfed)
    engine.check_integrity()
    return Ran(name, (*prompt, *record.output_ids), tuple(answers), record.receipt)


def lineage_before(runs: Sequence[LineageRun], position: int) -> tuple[LineageRun, ...]:
    """The part of a source's lineage map that a prompt shares up to ``position``."""
    return tuple(run for run in runs if run.start < position)


def edited_prompt(source: Sequence[int], edits: Sequence[Edit], tail: Sequence[int]) -> list[int]:
    """The tokens that edits make of a source, and a tail."""
    prompt: list[int] = []
    at = 0
    for start, end, replacement in edits:
        prompt += [*source[at:start], *replacement]
        at = end
    return [*prompt, *source[at:], *tail]


def kept_edits(treatments: Sequence[Treatment]) -> int:
    """Count the leading edits that amortize: tokens between and after them may be reused, up to the
    first edit that does not."""
    others = (i for i, how in enumerate(treatments) if how is not Treatment.AMORTIZE)
    return next(others, len(treatments))


def declared(edits: Sequence[Edit], treatments: Sequence[Treatment]) -> tuple[Directive, ...]:
    """Directives for edits up to the first exact one, and for every edit that forgets."""
    exact = treatments.index(Treatment.EXACT) if Treatment.EXACT in treatments else len(edits)
    return tuple(
        Directive(start, end, new, Mode(how))
        for index, ((start, end, new), how) in enumerate(zip(edits, treatments, strict=True))
        if index < exact or how is Treatment.FORGET
    )


def lowered(
    source: Sequence[int],
    edits: Sequence[Edit],
    treatments: Sequence[Treatment],
    prompt_length: int,
    boundary: int,
) -> tuple[Segment, ...]:
    """Segments of a prompt, all literal from the first exact edit on.

    What a forget takes away is left in: to keep it from being copied is the engine's duty.
    """
    exact = treatments.index(Treatment.EXACT) if Treatment.EXACT in treatments else len(edits)
    directives = tuple(Directive(*edit) for edit in edits[:exact])
    end = prompt_length
    if exact < len(edits):
        end = edits[exact][0] + sum(directive.delta for directive in directives)
    segments = lower_directives(directives, len(source), end)
    rest = (LiteralSegment(end, prompt_length - end),) if end < prompt_length else ()
    return (*widen_boundary(segments, boundary), *rest)


def widen_boundary(segments: Sequence[Segment], boundary: int) -> tuple[Segment, ...]:
    """The first ``boundary`` tokens of every copy after an edit become literals."""
    widened: list[Segment] = []
    for segment in segments:
        match segment:
            case CopySegment(source, start, end, dest) if dest > 0:
                cut = min(boundary, end - start)
                if cut:
                    widened.append(LiteralSegment(dest, cut))
                if start + cut < end:
                    widened.append(CopySegment(source, start + cut, end, dest + cut))
            case _:
                widened.append(segment)
    return tuple(widened)


@dataclass(slots=True)
class Conversation:
    """One session against an engine, turn after turn."""

    engine: ReplayEngine
    session: str = "s"
    scope: str = "tenant"
    turns: list[Ran] = field(default_factory=list)
    recurrent: RecurrentEdits = RecurrentEdits.KEPT

    def open(self, prompt: Sequence[int], forced: Sequence[int], unfed: int | None = None) -> Ran:
        """A turn that nothing was edited in; the lineage of the last turn is carried on."""
        runs = self.turns[-1].receipt.lineage if self.turns else ()
        payload = EditPayload(
            session=self.session, scope=self.scope, turn=self._name(), lineage=runs
        )
        return self._run(prompt, forced, unfed, payload)

    def edit(
        self,
        edits: Sequence[Edit],
        tail: Sequence[int],
        forced: Sequence[int],
        unfed: int | None = None,
        *,
        treatments: Sequence[Treatment] = (),
        boundary: int = 0,
    ) -> Ran:
        """The last turn, edited; every edit amortizes unless ``treatments`` say otherwise."""
        source = self.turns[-1]
        prompt = edited_prompt(source.tokens, edits, tail)
        treatments = treatments or [Treatment.AMORTIZE] * len(edits)
        directives = declared(edits, treatments)
        payload = EditPayload(
            session=self.session,
            scope=self.scope,
            turn=self._name(),
            sources=(source_ref(source),) if directives else (),
            directives=directives,
            segments=lowered(source.tokens, edits, treatments, len(prompt), boundary)
            if directives
            else (),
            lineage=lineage_before(source.receipt.lineage, edits[0][0]),
            recurrent=self.recurrent,
        )
        return self._run(prompt, forced, unfed, payload)

    def compose(
        self,
        sources: Sequence[Ran],
        segments: Sequence[Segment],
        prompt: Sequence[int],
        forced: Sequence[int],
    ) -> Ran:
        """A prompt put together from several earlier turns, the first of which gives its start."""
        payload = EditPayload(
            session=self.session,
            scope=self.scope,
            turn=self._name(),
            sources=tuple(source_ref(source) for source in sources),
            segments=tuple(segments),
            lineage=sources[0].receipt.lineage,
            recurrent=self.recurrent,
        )
        return self._run(prompt, forced, None, payload)

    def _name(self) -> str:
        return f"turn-{len(self.turns)}"

    def _run(
        self,
        prompt: Sequence[int],
        forced: Sequence[int],
        unfed: int | None,
        payload: EditPayload,
    ) -> Ran:
        ran = run_request(self.engine, prompt, forced, unfed, payload)
        self.turns.append(ran)
        return ran


def source_ref(source: Ran) -> SourceRef:
    """A payload's reference to a turn that the engine retains."""
    return SourceRef(source.turn, len(source.tokens), token_digest(source.tokens))


@dataclass(frozen=True, slots=True)
class TamperedLayers:
    """A stand-in for the rotations of the engine's layers."""

    tampered: Callable[[int], TamperedRotary]

    def at(self, layer: int) -> TamperedRotary:
        """Give a layer's rotation, as the engine asks for it."""
        return self.tampered(layer)


@dataclass(frozen=True, slots=True)
class TamperedRotary:
    """A rotation that moves a layer's keys wrongly."""

    move: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

    def rotate(
        self, keys: torch.Tensor, computed_at: torch.Tensor, needed_at: torch.Tensor
    ) -> torch.Tensor:
        """Rotate as the engine calls it: keys ``[T, heads, d]``, positions ``[T]``."""
        return self.move(keys, computed_at, needed_at)


def tamper(engine: ReplayEngine, how: str, subject: OracleModel) -> None:
    """Make an engine's splices wrong in one named way; see ``TAMPERINGS``.

    ``other_layer`` takes the rotation of a layer that turns differently.
    """
    right = engine.cache.pool.rotary

    def tampered(layer: int) -> TamperedRotary:
        if how == "other_layer":
            other = right.distinct[(right.index(layer) + 1) % len(right.distinct)]
            return TamperedRotary(_mover(other))
        return TamperedRotary(TAMPERINGS[how](right.at(layer), subject))

    stand_in: Any = TamperedLayers(tampered)
    engine.cache.pool.rotary = stand_in


def chain_naively(engine: ReplayEngine) -> None:
    """Make an engine take every key that it moved for one computed where it now is."""
    pool = engine.cache.pool
    copy = pool.copy

    def forgetful(source: Slots, target: Slots, start: int) -> None:
        copy(source, target, start)
        pool.write(target, start, [pool.read(layer, target) for layer in range(pool.layout.layers)])

    pool.copy = forgetful  # type: ignore[method-assign]


def _turn(
    keys: torch.Tensor, angles: torch.Tensor, *, interleaved: bool, scale: float = 1.0
) -> torch.Tensor:
    """A rotation of the tests' own, so that wrong ones don't depend on the right one."""
    cos, sin = angles.cos()[:, None] * scale, angles.sin()[:, None] * scale
    if interleaved:
        first, second = keys[..., 0::2], keys[..., 1::2]
        pairs = (first * cos - second * sin, second * cos + first * sin)
        return torch.stack(pairs, dim=-1).flatten(-2)
    first, second = keys.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _mover(
    rotary: Any,
    *,
    interleaved: bool | None = None,
    inv_freq: torch.Tensor | None = None,
    off_by: int = 0,
    scale: float = 1.0,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    right = rotary.pairing == "interleaved"
    pairing = right if interleaved is None else interleaved
    frequencies = rotary.inv_freq if inv_freq is None else inv_freq

    def move(
        keys: torch.Tensor, computed_at: torch.Tensor, needed_at: torch.Tensor
    ) -> torch.Tensor:
        delta = (needed_at - computed_at + off_by).float()[:, None]
        return _turn(keys, delta * frequencies, interleaved=pairing, scale=scale)

    return move


def _default_base(rotary: Any, theta: float) -> torch.Tensor:
    width = 2 * len(rotary.inv_freq)
    return 1.0 / theta ** (torch.arange(0, width, 2).float() / width)


def _half_band(rotary: Any) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Turn a band of half the width alone, with the frequencies of its own width."""
    turn = _mover(rotary, inv_freq=rotary.inv_freq[::2])

    def move(
        keys: torch.Tensor, computed_at: torch.Tensor, needed_at: torch.Tensor
    ) -> torch.Tensor:
        half = keys.shape[-1] // 2
        return torch.cat((turn(keys[..., :half], computed_at, needed_at), keys[..., half:]), dim=-1)

    return move


TAMPERINGS: dict[str, Callable[[Any, OracleModel], Callable[..., torch.Tensor]]] = {
    "none": lambda rotary, _: _mover(rotary),
    "no_rotation": lambda *_: lambda keys, *_positions: keys,
    "wrong_pairing": lambda rotary, _: _mover(rotary, interleaved=rotary.pairing != "interleaved"),
    "wrong_base": lambda rotary, _: _mover(rotary, inv_freq=_default_base(rotary, 500_000.0)),
    "wrong_sign": lambda rotary, _: _mover(rotary, inv_freq=-rotary.inv_freq),
    "off_by_one": lambda rotary, _: _mover(rotary, off_by=1),
    "wrong_width": lambda rotary, _: _half_band(rotary),
    "scaling_ignored": lambda rotary, _: _mover(rotary, inv_freq=_default_base(rotary, 10_000.0)),
    "scaled_twice": lambda rotary, subject: _mover(
        rotary, scale=float(subject.model.base_model.rotary_emb.attention_scaling)
    ),
}
"""Ways to get a splice wrong. ``none`` is right, and shows that tampering as such changes nothing.

``scaling_ignored`` differs from the truth only for models with scaled frequencies, and
``scaled_twice`` only where the attention factor isn't 1.
"""
