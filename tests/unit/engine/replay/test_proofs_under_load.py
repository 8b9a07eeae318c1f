"""Proofs while sixteen sessions run: steps interleave, sessions edit, share and forget."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace
from proof_kit import NONCE, place_of, settled, survivors
from support.replay_engine import LIVE, SCOPE, edit, ids, make_engine, random_tokens

from leyline_engine.contract import Directive, EditPayload, Proof, SpanLabel
from leyline_replay.engine import GenerationRequest, PoolExhaustedError, ReplayEngine
from leyline_replay.sequence import Sequence

SESSIONS = 16
SYSTEM = random_tokens(40, 100)


@dataclass
class Agents:
    """Sixteen agents that take turns in random order, and share what they begin with."""

    engine: ReplayEngine
    random: random.Random
    talks: dict[str, list[int]] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=dict)
    running: dict[str, tuple[Sequence, int]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    proofs: dict[str, Proof] = field(default_factory=dict)
    closed_late: int = 0
    spliced: int = 0

    def step(self) -> None:
        """Admit one more request, or run one step of a running one."""
        name = f"s{self.random.randrange(SESSIONS)}"
        if name in self.running and self.random.random() < 0.9:
            self._advance(name)
        elif self.random.random() < 0.06:
            self._forget(name)
        elif name not in self.running:
            self._begin(name)
        for ticket, proof in settled(self.engine).items():
            earlier = self.proofs.get(ticket)
            self.closed_late += earlier is not None and earlier.pending
            self.proofs[ticket] = proof

    def _begin(self, name: str) -> None:
        talk = self.talks.setdefault(name, [*SYSTEM, *random_tokens(30, int(name[1:]) % 5)])
        turn = self.turns[name] = self.turns.get(name, 0) + 1
        payload = EditPayload(session=name, scope=SCOPE, turn=f"{name}-{turn}")
        prompt = [*talk, self.random.randrange(1, 256)]
        source = self.engine.cache.registry.get((SCOPE, name), f"{name}-{turn - 1}")
        if source is not None and len(source.tokens) > 80 and self.random.random() < 0.4:
            cut = Directive(45, 45 + self.random.randrange(1, 20))
            prompt, payload = edit(
                source.tokens.tolist(),
                [cut],
                tail=[self.random.randrange(1, 256)],
                session=name,
                source_turn=source.turn,
                turn=payload.turn,
                lineage=source.lineage,
            )
        spans = (SpanLabel("system", 0, 40), SpanLabel(f"m{turn}", 40, len(prompt)))
        self._admit(name, prompt, replace(payload, spans=spans))

    def _admit(self, name: str, prompt: list[int], payload: EditPayload) -> None:
        ticket = f"{payload.turn}-{len(self.proofs)}-{len(self.asked)}"
        request = GenerationRequest(
            ticket,
            ids(prompt),
            payload,
            None if payload.forget else LIVE,
            prove=NONCE if payload.forget else None,
            max_new_tokens=8,
        )
        try:
            sequence = self.engine.admit(request)
        except PoolExhaustedError:
            return
        self.spliced += sequence.receipt.tokens.spliced + sequence.receipt.tokens.reused
        if payload.forget:
            self.asked.append(ticket)
            self.running[ticket] = sequence, 1
        else:
            self.running[name] = sequence, self.random.randrange(1, 6)

    def _forget(self, name: str) -> None:
        turn = self.turns[name] = self.turns.get(name, 0) + 1
        payload = EditPayload(session=name, scope=SCOPE, turn=f"{name}-{turn}", forget=("*",))
        self._admit(name, [7], payload)
        for ticket in [ticket for ticket in self.running if ticket in self.asked]:
            self._advance(ticket)

    def _advance(self, name: str) -> None:
        sequence, left = self.running[name]
        try:
            if sequence.pending:
                sequence.prefill_step()
            elif left:
                sequence.decode_step(self.random.randrange(1, 256))
                self.running[name] = sequence, left - 1
            else:
                self._end(name, sequence)
        except PoolExhaustedError:
            self._end(name, sequence)

    def _end(self, name: str, sequence: Sequence) -> None:
        del self.running[name]
        sequence.finish()
        if name in self.talks and len(self.talks[name]) < 140:
            self.talks[name] = [*sequence.prompt, *sequence.fed]

    def finish(self) -> None:
        """End all requests."""
        while self.running:
            for name in tuple(self.running):
                self._advance(name)
        self.proofs.update(settled(self.engine))


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))]
)
def test_forgets_under_load_are_proven_clean(seed: int) -> None:
    """Each proof closes without survivors, though others share text, copy it and run meanwhile."""
    agents = Agents(make_engine(pool=1400, chunk=16), random.Random(seed))
    agents.engine.proofs.max_open = 64
    for _ in range(1200):
        agents.step()
    agents.finish()
    proofs = [agents.proofs[ticket] for ticket in agents.asked]
    assert len(proofs) > 10 and agents.closed_late and agents.spliced > 500
    assert [survivors(proof) for proof in proofs if proof.survivors] == []
    assert all(proof.complete for proof in proofs)
    assert sum(proof.doomed for proof in proofs) > 500
    assert sum(place_of(proof, "pool.tree").kept for proof in proofs) > 50
