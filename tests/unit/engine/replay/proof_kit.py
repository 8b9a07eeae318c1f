"""Forgets with proofs on a tiny engine, and rows that are planted against them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

import torch
from support.replay_engine import (
    BASE,
    SCOPE,
    LlamaConfig,
    LoadedModel,
    MatcherKind,
    ids,
    make_model,
    prefill,
    random_tokens,
)

from leyline_engine.contract import EditPayload, Proof, ProofPlace, ProvePayload
from leyline_replay.engine import GenerationRequest, ReplayEngine
from leyline_replay.sequence import Sequence

NONCE = ProvePayload(nonce="5e" * 32)
TEXT = random_tokens(100, 3)
OTHER = random_tokens(90, 4)
LAYERS = 4
"""Layers of a :func:`deep_engine`."""
_NAMES = count()


def deep_engine(pool: int = 600) -> ReplayEngine:
    """An engine of several layers: the second one's rows depend on visible tokens alone."""
    config = LlamaConfig(**{**BASE, "num_hidden_layers": LAYERS}, num_key_value_heads=1)
    loaded = LoadedModel("tiny", make_model(config), None, "f" * 32, "")
    return ReplayEngine(
        loaded, pool_tokens=pool, chunk_tokens=32, splicing=True, matcher=MatcherKind.WINNOW
    )


def begin(
    engine: ReplayEngine,
    session: str = "s",
    spans: Iterable[str] = ("*",),
    prompt: Iterable[int] = (7,),
) -> Sequence:
    """Admit a request that forgets with a proof."""
    name = f"p{next(_NAMES)}"
    payload = EditPayload(session=session, scope=SCOPE, turn=name, forget=tuple(spans))
    return engine.admit(
        GenerationRequest(name, ids(prompt), payload, prove=NONCE, max_new_tokens=2)
    )


def settled(engine: ReplayEngine) -> dict[str, Proof]:
    """Proofs that changed since the last call, as the service asks for them."""
    return engine.settled_proofs(engine.settled_forgets())


def proven(
    engine: ReplayEngine,
    session: str = "s",
    spans: Iterable[str] = ("*",),
    prompt: Iterable[int] = (7,),
) -> Proof:
    """Forget with a proof, and return it as it is right afterwards."""
    request = begin(engine, session, spans, prompt)
    proof = settled(engine)[request.receipt.message_id]
    prefill(request)
    request.finish()
    return proof


def survivors(proof: Proof) -> dict[str, int]:
    """Survivors by place."""
    return {place.place: place.survivors for place in proof.places if place.survivors}


def place_of(proof: Proof, name: str) -> ProofPlace:
    """One place of a proof."""
    return next(place for place in proof.places if place.place == name)


def plant(engine: ReplayEngine, source: int, target: int, *, layer: int | None = None) -> None:
    """Copy a row to another slot, in all layers or in one, unnoticed by the engine."""
    pool = engine.cache.pool
    for at, pair in enumerate(pool._tensors):
        for tensor in pair if layer in (None, at) else ():
            tensor[target] = tensor[source]


def plant_origin(engine: ReplayEngine, source: int, target: int) -> None:
    """Copy a row's as-computed keys alone to another slot."""
    for tensor in engine.cache.pool._as_computed:
        tensor[target] = tensor[source]


def same_rows(engine: ReplayEngine, one: int, other: int) -> bool:
    """True if two slots hold the same values in the last layer."""
    values = engine.cache.pool._tensors[-1][1]
    return bool(torch.equal(values[one], values[other]))
