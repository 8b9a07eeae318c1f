"""A client of one engine's claims, its turns, and what must hold between book, shelf and blocks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
from contract_kit import BLOCK
from secret_rows import draw_ordinary
from splice_kit import Answer, SplicingEngine, splicing_engine

from leyline_engine.claims.runs import pages_of
from leyline_engine.contract import (
    Claim,
    ClaimCommand,
    ClaimKind,
    ClaimRefusal,
    ClaimReply,
    ClaimState,
    ClaimStatus,
    DemoteClaim,
    Directive,
    EditPayload,
    GetClaim,
    Predicate,
    ReleaseClaim,
    SubmitClaim,
    apply_directives,
)
from leyline_engine.records.publications import Space
from leyline_engine.server.claim_clock import ClaimAnswer, ClaimMessage

TENANT = "t"
SPACE = Space()


class Claimant:
    """A client of one engine's claims, with the clock of its messages."""

    def __init__(self, engine: SplicingEngine) -> None:
        self.engine = engine
        self.leyline = engine.leyline
        self.now_ms = 0
        self._orders, self._revisions = count(1), count(1)
        self._texts = random.Random(99)

    # Commands.

    def send(self, command: ClaimCommand | None = None) -> ClaimReply:
        """Carry out a command, or let the time come."""
        text = "" if command is None else msgspec.json.encode(command).decode()
        message = ClaimMessage(next(self._orders), self.now_ms, text)
        answer = self.leyline.control(msgspec.json.encode(message).decode())
        return msgspec.json.decode(answer, type=ClaimAnswer).reply

    def tick(self, milliseconds: int) -> None:
        """Let time pass."""
        self.now_ms += milliseconds
        self.send()

    def try_claim(self, session: str, end: int, **terms: Any) -> ClaimReply:
        """Claim ``[start, end)`` of a session's turn, hard unless ``terms`` say otherwise."""
        source, start = terms.pop("source", "a"), terms.pop("start", 0)
        span = Predicate(source, start, end, terms.pop("share", 1.0))
        given = {"id": session, "tenant": TENANT, "kind": ClaimKind.HARD, "session": session}
        given["revision"] = next(self._revisions)
        return self.send(SubmitClaim(Claim(predicate=span, **(given | terms))))

    def claim(self, session: str, end: int, **terms: Any) -> ClaimStatus:
        """The same where nothing is wrong with it."""
        status = the_one(self.try_claim(session, end, **terms))
        assert status.state is ClaimState.MATERIALIZED, status
        return status

    def status(self, claim: str, tenant: str = TENANT) -> ClaimStatus:
        """A claim as it is now."""
        return the_one(self.send(GetClaim(tenant, claim)))

    def state(self, claim: str, tenant: str = TENANT) -> ClaimState:
        """The state of a claim."""
        return self.status(claim, tenant).state

    def release(self, claim: str, tenant: str = TENANT) -> None:
        """Release a claim."""
        the_one(self.send(ReleaseClaim(tenant, claim)))

    def demote(self, claim: str, tenant: str = TENANT) -> None:
        """Give a claim's locks up."""
        assert the_one(self.send(DemoteClaim(tenant, claim))).state is ClaimState.DEMOTED

    # Turns.

    def text(self, length: int) -> tuple[int, ...]:
        """Tokens that nobody has sent before."""
        return draw_ordinary(self._texts, length)

    def opened(
        self, session: str, prompt: Sequence[int] = (), *, tenant: str = TENANT, **members: Any
    ) -> Answer:
        """A session's first turn."""
        payload = EditPayload(session=session, scope=tenant, turn="a", **members)
        return self.engine.ask(prompt or self.text(300), payload)

    def edit(
        self, before: Answer, session: str, source: str, turn: str, cut: Directive, **options: Any
    ) -> Answer:
        """A turn that edits an earlier one."""
        assert before.record is not None
        payload = EditPayload(
            session=session,
            scope=TENANT,
            turn=turn,
            sources=(before.ref(source),),
            directives=(cut,),
            lineage=before.record.receipt.lineage,
        )
        prompt = (*apply_directives(before.tokens, (cut,)), *self.text(5))
        return self.engine.ask(prompt, payload, **options)

    def press(self) -> None:
        """Run requests of nobody that need more blocks than there are."""
        for _ in range(8):
            self.engine.ask(self.text(300))

    def take(self, length: int, decode: int = 8) -> Answer:
        """Run a request of nobody."""
        return self.engine.ask(self.text(length), decode=decode)

    def step(self, rounds: int = 1) -> None:
        """Let the scheduler work."""
        for _ in range(rounds):
            self.engine.llm.llm_engine.step()

    def cached(self, tokens: Sequence[int]) -> int:
        """The number of leading tokens that are found without an edit; no recency changes."""
        plain = self.leyline._keys._hasher.plain(tokens, SPACE)
        return len(self.leyline.cache.find(plain)) * BLOCK

    def kept(self, key: tuple[str, str]) -> int:
        """The number of tokens that are found of a claim's path, also after a splice."""
        place = self.leyline.claims.keeper.places[key]
        return len(self.leyline.claims.shelf.slots(place))

    # What must always hold.

    def check(self) -> None:
        """Locks, ranks and names are those of live claims, which are found; and each block has the
        holders that are counted."""
        keeper, shelf = self.leyline.claims.keeper, self.leyline.claims.shelf
        live = {(s.claim.tenant, s.claim.id): s for s in keeper.book.live()}
        assert keeper.places.keys() == live.keys()
        locks = {k for k, s in live.items() if s.claim.hard and s.state is ClaimState.MATERIALIZED}
        assert shelf._locked.keys() == locks
        assert shelf._ranked.keys() == live.keys() - locks
        assert len(shelf.held) == keeper.book.protected_pages
        pages = {page for key in live for page in pages_of(keeper.book.held(key))}
        assert len(keeper.names) == len(pages)
        for key, (_, blocks) in shelf._locked.items():
            found = shelf._find(keeper.places[key], len(blocks) * BLOCK)
            assert found == blocks, f"{key} lost what it locks"
        for key in live:
            assert not keeper._missing(key), f"{key} lost KV without notice"
        assert shelf._ranks_of == Counter(
            int(block.block_id) for each in shelf._ranked.values() for block in each.blocks
        )
        self.check_holders()

    def check_holders(self) -> None:
        """The pool counts the holders of each block: claims, requests and what these copy from."""
        owners = Counter(self.leyline.claims.shelf.held)
        manager = self.engine.scheduler.kv_cache_manager
        for name in self.engine.scheduler.requests:
            owners.update(manager.get_block_ids(name)[0])
        for turn in self.leyline.turns.values():
            if turn.staging is not None:
                owners.update(int(block.block_id) for block in turn.staging.pinned)
        for block in self.leyline.cache._pool.blocks[1:]:
            assert block.ref_cnt == owners[int(block.block_id)], block

    def rest(self) -> None:
        """Nothing runs and nothing is claimed: all blocks are free, and nothing is remembered."""
        self.engine.settle()
        for status in self.leyline.claims.keeper.book.live():
            self.release(status.claim.id, status.claim.tenant)
        self.check()
        assert not self.leyline.claims.shelf.held
        assert not self.leyline.turns
        assert len(self.leyline.claims.keeper.names) == 0
        assert self.leyline.cache.free == self.leyline.cache.capacity // BLOCK
        assert self.engine.scheduler.reset_prefix_cache()


@contextmanager
def claiming_engine(folder: Path, blocks: int, **settings: Any) -> Iterator[Claimant]:
    """Start an engine of few blocks."""
    small = {"num_gpu_blocks_override": blocks, "max_model_len": BLOCK * (blocks - 1)}
    with splicing_engine(folder, **(small | settings)) as engine:
        yield Claimant(engine)


def refusal(answer: Answer) -> ClaimRefusal:
    """The reason of a request's refusal; its client and its receipt got it."""
    assert answer.error.startswith("refused_by_claim: "), answer
    assert answer.record is not None and answer.record.finished
    receipt = answer.record.receipt
    assert receipt.refused is not None
    assert not receipt.turn
    return receipt.refused


def the_one(reply: ClaimReply) -> ClaimStatus:
    """The only claim of a reply."""
    assert reply.problem is None, reply.problem
    (status,) = reply.claims
    return status
