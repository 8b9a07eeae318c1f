"""Splices of a real vLLM engine against the amortize contract computed the long way round."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from contract_kit import (
    BLOCK,
    BOUND,
    CONTROL_FACTOR,
    ROWS_BOUND,
    Played,
    PlayedSession,
    distance,
    draw_tokens,
    expect,
    kept_after_prefix,
    load_reference,
    row_errors,
)
from oracle_models import OracleModel
from oracle_reference import Keep, Remembered
from splice_kit import SplicingEngine, splicing_engine
from vllm_models import build_vllm_model

from leyline_engine.contract import CopySegment, Directive, LiteralSegment, Outcome


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama."""
    return build_vllm_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[SplicingEngine]:
    """An engine with Leyline."""
    with splicing_engine(folder) as started:
        yield started


@pytest.fixture(scope="module")
def subject(folder: Path) -> OracleModel:
    """The same model in transformers."""
    return load_reference(folder)


def check_turn(session: PlayedSession, played: Played) -> None:
    """A turn's answer, token counts and rows are those of the contract."""
    tokens, first = played.receipt.tokens, played.pieces[0]
    prefix = first.end if isinstance(first, Keep) and first.end % BLOCK == 0 else 0
    spliced = kept_after_prefix(played.pieces)
    prompt = len(played.answer.prompt)
    assert (tokens.prompt, tokens.prefix, tokens.spliced) == (prompt, prefix, spliced)
    assert tokens.prefilled == prompt - prefix - spliced
    assert played.answer.cached == prefix + spliced
    assert (played.receipt.outcome is Outcome.SPLICED) == bool(spliced)
    assert played.error <= BOUND
    assert max(row_errors(session.subject, played)) <= ROWS_BOUND


def draw_directives(rng: random.Random, source: tuple[int, ...], most: int) -> list[Directive]:
    """Deletions, insertions and replacements; the first changes the token where it begins."""
    while True:
        cuts = sorted(rng.sample(range(40, len(source)), 2 * rng.randint(1, most)))
        drawn = [_draw(rng, a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
        after = (*drawn[0].replacement, *source[drawn[0].end :])
        if after and after[0] != source[drawn[0].start]:
            return drawn


def _draw(rng: random.Random, start: int, end: int) -> Directive:
    end = min(end, start + rng.choice([1, 5, 30, 90]))
    match rng.choice(["delete", "insert", "replace"]):
        case "delete":
            return Directive(start, end)
        case "insert":
            return Directive(start, start, draw_tokens(rng, rng.choice([1, 8, 70])))
        case _:
            return Directive(start, end, draw_tokens(rng, rng.choice([1, 8, end - start, 70])))


def compose(session: PlayedSession, rng: random.Random) -> Played:
    """The start of one turn, something new, a piece of another, and a tail."""
    one, two = rng.sample(session.turns, 2)
    prefix, start = rng.randint(40, 120), rng.randint(10, 60)
    end = rng.randint(start + 80, len(two.tokens) - 1)
    new, tail = draw_tokens(rng, rng.choice([3, 40])), draw_tokens(rng, rng.choice([1, 6]))
    at = prefix + len(new)
    segments = (
        CopySegment(0, 0, prefix, 0),
        LiteralSegment(prefix, len(new)),
        CopySegment(1, start, end, at),
        LiteralSegment(at + end - start, len(tail)),
    )
    prompt = (*one.tokens[:prefix], *new, *two.tokens[start:end], *tail)
    return session.compose([one, two], segments, prompt)


def play(session: PlayedSession, rng: random.Random, turns: int) -> Iterator[Played]:
    """An opening, then edits of the last turn or of an earlier one, or pieces of two."""
    yield session.open(draw_tokens(rng, rng.randint(300, 900)))
    for _ in range(turns):
        if len(session.turns) > 1 and rng.random() < 0.25:
            yield compose(session, rng)
            continue
        source = session.turns[-1] if rng.random() < 0.7 else rng.choice(session.turns)
        edits = draw_directives(rng, source.tokens, rng.choice([1, 3, 6]))
        yield session.edit(source, edits, draw_tokens(rng, rng.choice([1, 6, 40])))


@pytest.mark.parametrize("seed", range(4))
def test_random_edits_on_vllm_give_the_contracts_answers(
    engine: SplicingEngine, subject: OracleModel, seed: int
) -> None:
    """Random edits over several turns and sources agree in answers, token counts and rows."""
    session = PlayedSession(engine, subject, f"seed{seed}")
    stages = copies = 0
    for played in play(session, random.Random(seed), 4):
        check_turn(session, played)
        stages = max(stages, played.receipt.stages)
        copies = max(copies, len(played.receipt.extents))
    assert copies
    free = engine.leyline.cache.free
    assert free == engine.leyline.cache.capacity // BLOCK


def test_a_reference_whose_keys_stay_unturned_is_far_outside_the_bound(
    engine: SplicingEngine, subject: OracleModel
) -> None:
    """An answer is a hundred bounds off from a reference that moves keys without turning them."""
    rng = random.Random("control")
    session = PlayedSession(engine, subject, "control")
    opened = session.open(draw_tokens(rng, 700))
    played = session.edit(opened, [Directive(200, 400)], draw_tokens(rng, 4))
    check_turn(session, played)
    wrong = [_unturned(piece, at) for piece, at in _placed(played)]
    assert distance(played.answer, expect(subject, wrong, played.answer)) > CONTROL_FACTOR * BOUND


def _placed(played: Played) -> Iterator[tuple[object, int]]:
    at = 0
    for piece in played.pieces:
        yield piece, at
        at += piece.end - piece.start if isinstance(piece, Keep) else len(piece.tokens)


def _unturned(piece: object, at: int) -> object:
    """Return a kept piece whose keys, once the reference turns them, stand as they were."""
    if not isinstance(piece, Keep) or piece.start == at:
        return piece
    half = piece.turn.keys[0].shape[-1] // 2
    inv = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = (piece.start - at) * inv
    cos, sin = angle.cos(), angle.sin()

    def turned(key: torch.Tensor) -> torch.Tensor:
        first, second = key.double().chunk(2, dim=-1)
        parts = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat(parts, dim=-1).to(key.dtype)

    part = slice(piece.start, piece.end)
    turn = Remembered(
        piece.turn.tokens[part],
        tuple(turned(key[part]) for key in piece.turn.keys),
        tuple(other[part] for other in piece.turn.others),
    )
    return Keep(turn, 0, piece.end - piece.start)
