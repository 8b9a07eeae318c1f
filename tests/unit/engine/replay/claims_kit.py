"""A replay engine over the shipped model, and short ways to claim what it holds."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Sequence
from functools import cache, partial
from itertools import count
from typing import Any

from leyline_engine.claims.limits import Limits
from leyline_engine.contract import (
    Claim,
    ClaimCommand,
    ClaimKind,
    ClaimReply,
    ClaimStatus,
    CopySegment,
    EditPayload,
    LiteralSegment,
    Predicate,
    ReleaseClaim,
    SourceRef,
    SubmitClaim,
    TurnRecord,
    token_digest,
)
from leyline_replay.engine import GenerationRequest, ReplayEngine
from leyline_replay.engine_claims import EngineClaims
from leyline_replay.models.loader import LoadedModel, load_model
from leyline_replay.sequence import Sequence as Running

TENANT, SESSION = "t", "s"
ALL = Limits(share=1.0, engine_share=1.0)
_REQUESTS = count()


@cache
def shipped() -> LoadedModel:
    """The default model, on the CPU."""
    return load_model(device="cpu")


def make_engine(pool: int = 400, page: int = 1, **limits: Any) -> ReplayEngine:
    """An engine whose pool may be claimed whole, unless limits say otherwise."""
    open_claims = partial(EngineClaims, limits=Limits(**limits) if limits else ALL)
    return ReplayEngine(
        shipped(), pool_tokens=pool, page_tokens=page, chunk_tokens=64, open_claims=open_claims
    )


def tokens(number: int, seed: int) -> list[int]:
    """Token ids; no two seeds begin alike."""
    stream = random.Random(seed)
    return [seed, *(stream.randrange(100, 400) for _ in range(number - 1))]


def named(turn: str, *, session: str = SESSION, tenant: str = TENANT, **more: Any) -> EditPayload:
    """A payload that retains its turn."""
    return EditPayload(session=session, scope=tenant, turn=turn, **more)


def ask(
    prompt: Iterable[int], payload: EditPayload | None = None, *, room: int = 4, **more: Any
) -> GenerationRequest:
    """A request for ``room`` tokens."""
    name = f"r{next(_REQUESTS)}"
    return GenerationRequest(name, array("q", prompt), payload, max_new_tokens=room, **more)


def start(engine: ReplayEngine, request: GenerationRequest) -> Running:
    """Admit a request and run its prompt."""
    sequence = engine.admit(request)
    while sequence.pending:
        sequence.prefill_step()
    return sequence


def run(
    engine: ReplayEngine, prompt: Iterable[int], payload: EditPayload | None = None, output: int = 4
) -> TurnRecord:
    """One request from admission to its end; it says fixed tokens, the last without KV."""
    sequence = start(engine, ask(prompt, payload, room=output))
    for token in range(1, output + 1):
        sequence.decode_step(token)
    record = sequence.finish(output + 1)
    engine.check_integrity()
    check_claims(engine)
    return record


def keep(engine: ReplayEngine, turn: str, length: int, seed: int, **more: Any) -> list[int]:
    """Retain a turn of ``length`` tokens with KV; the tokens."""
    prompt = tokens(length - 4, seed)
    run(engine, prompt, named(turn, **more))
    return [*prompt, 1, 2, 3, 4]


def cut(
    engine: ReplayEngine, source: str, turn: str, gap: tuple[int, int], tail: Sequence[int] = (9,)
) -> tuple[list[int], EditPayload]:
    """A turn that has all of another but a gap, and a tail: its prompt and payload."""
    kept = engine.cache.registry.get((TENANT, SESSION), source)
    assert kept is not None
    (start, end), length = gap, len(kept.tokens) - 1
    prompt = [*kept.tokens[:start], *kept.tokens[end:length], *tail]
    payload = named(
        turn,
        sources=(SourceRef(source, len(kept.tokens), token_digest(kept.tokens)),),
        segments=(
            CopySegment(0, 0, start, 0),
            CopySegment(0, end, length, start),
            LiteralSegment(len(prompt) - len(tail), len(tail)),
        ),
        lineage=kept.lineage,
    )
    return prompt, payload


def make_claim(source: str, end: int, start: int = 0, **terms: Any) -> Claim:
    """A hard claim, unless ``terms`` say otherwise."""
    share = terms.pop("share", 1.0)
    given = {"id": "c", "tenant": TENANT, "session": SESSION, "kind": ClaimKind.HARD} | terms
    return Claim(predicate=Predicate(source, start, end, share), **given)


def claim(engine: ReplayEngine, source: str, end: int, start: int = 0, **terms: Any) -> ClaimReply:
    """Claim tokens of a turn."""
    return command(engine, SubmitClaim(make_claim(source, end, start, **terms)))


def release(engine: ReplayEngine, name: str = "c") -> ClaimReply:
    """End a claim."""
    return command(engine, ReleaseClaim(TENANT, name))


def command(engine: ReplayEngine, what: ClaimCommand) -> ClaimReply:
    """Carry out a command."""
    reply = engine.claims.keeper.carry_out(what)
    engine.check_integrity()
    check_claims(engine)
    return reply


def status(engine: ReplayEngine, name: str = "c", tenant: str = TENANT) -> ClaimStatus:
    """The status of a claim."""
    return engine.claims.keeper.book.status(tenant, name)


def kinds(engine: ReplayEngine) -> list[str]:
    """The events so far, by kind."""
    return [type(event).__name__ for event in engine.claims.keeper.ledger]


def cached(engine: ReplayEngine, prompt: Iterable[int]) -> int:
    """The number of a prompt's tokens that are cached as exact KV."""
    return len(engine.cache.tree.peek(array("q", prompt)))


def check_claims(engine: ReplayEngine) -> None:
    """The tree holds for claims what the book says, and names are for what is held."""
    keeper, shelf, tree = engine.claims.keeper, engine.claims.shelf, engine.cache.tree
    paths = {node for end in shelf.locked() for node in tree.path(end)}
    locked = sum(len(node.slots) for node in paths)
    assert locked == keeper.book.protected_pages * engine.cache.page_tokens
    if not keeper.watched:
        held = {
            (run.source, page)
            for found in keeper.book.live()
            for run in keeper.book.held((found.claim.tenant, found.claim.id))
            for page in range(run.start, run.end)
        }
        assert len(keeper.names) == len(held)
