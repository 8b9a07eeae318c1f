"""Readers of the secret, where every request reuses whatever content it finds."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from ledger_machine import LedgerMachine
from support.examples import examples
from support.replay_engine import SCOPE, random_tokens
from taint_machine import MAX_TURNS, PIECES, SECRET, STEM

from leyline_engine.contract import EditPayload, LineageRun, ReuseMode, ReusePayload
from leyline_engine.records.lineage import fold_keys

DOCUMENT = [token for token in random_tokens(90, 12) if token != SECRET]
HEADS = [[token for token in random_tokens(40, seed) if token != SECRET] for seed in (21, 22, 23)]
OTHERS = ("v", "w")


class ReuseMachine(LedgerMachine):
    """Session s has a document after the secret; sessions v and w have it after other texts.

    Session w is another tenant's, in a group with the first.
    """

    asked = ReusePayload(mode=ReuseMode.LIVE, groups=("docs",))
    tenants: ClassVar = {"v": SCOPE, "w": "another tenant"}
    """Tenants of the other sessions."""

    def __init__(self) -> None:
        super().__init__()
        self.others: list[tuple[str, list[int], tuple[LineageRun, ...]]] = []

    def _never_read(self) -> set[str]:
        """Nothing: what a copy has read is noted by position, and rather too much."""
        return set()

    @rule(cut=st.integers(30, 60), before=PIECES, secret=st.booleans(), after=PIECES)
    def document(self, cut: int, before: list[int], secret: bool, after: list[int]) -> None:
        """Session s sends the document, after the secret or without it."""
        tokens = [*STEM[:cut], *before, *([SECRET] if secret else []), *DOCUMENT, *after, 5]
        self._run(tokens, self._payload("s"), decode=1)

    @rule(
        session=st.sampled_from(OTHERS),
        head=st.sampled_from(HEADS),
        start=st.integers(0, 20),
        tail=PIECES,
        steps=st.integers(-1, 9),
    )
    def read(self, session: str, head: list[int], start: int, tail: list[int], steps: int) -> None:
        """Another session sends the document after a beginning of its own, or is sending it."""
        self._send(session, [*head, *DOCUMENT[start:], *tail, 6], (), steps)

    @precondition(lambda self: self.others)
    @rule(which=st.integers(0, MAX_TURNS - 1), tail=PIECES, steps=st.integers(-1, 9))
    def read_on(self, which: int, tail: list[int], steps: int) -> None:
        """Another session continues what it has, under its lineage."""
        session, tokens, lineage = self.others[which % len(self.others)]
        self._send(session, [*tokens, *tail, 6], lineage, steps)

    def _of(self, session: str, lineage: tuple[LineageRun, ...]) -> EditPayload:
        """The payload of one of the other sessions."""
        return msgspec.structs.replace(self._payload(session, lineage), scope=self.tenants[session])

    def _send(
        self, session: str, tokens: list[int], lineage: tuple[LineageRun, ...], steps: int
    ) -> None:
        payload = self._of(session, lineage)
        if steps >= 0:
            if len(self.running) < 3:
                self._begin(tokens, payload, steps)
            return
        sequence = self._admit(tokens, payload)
        self._complete(sequence, tokens, decode=1)
        self.others = [*self.others, (session, tokens, sequence.lineage)][-MAX_TURNS:]


def test_the_machine_reuses_what_it_means_to() -> None:
    """KV that has read the secret is copied into another session, and a forget takes it out."""
    machine = ReuseMachine()
    machine.start()
    machine.document(60, [1], True, [2])
    machine.read("v", HEADS[0], 3, [1], -1)
    machine.read("w", HEADS[1], 5, [2], -1)
    kept = [fold_keys(tokens, runs, machine.tenants[name]) for name, tokens, runs in machine.others]
    for keys in kept:
        assert machine.tainted[machine.engine.cache.match(keys).slots].any()
    machine.forget_by_name(0, [1], True, True, False)
    for keys in kept:
        assert machine.engine.cache.match(keys).length <= len(HEADS[0]) + 1
    machine.what_is_forgotten_stays_forgotten()


class GatedMachine(ReuseMachine):
    """The same, where the margin gate undoes every prefill with reuse, while others forget."""

    asked = ReusePayload(mode=ReuseMode.LIVE, margin=100)


def test_the_machine_gates_what_it_means_to() -> None:
    """Copies that have read the secret are undone; what is computed in their place hasn't."""
    machine = GatedMachine()
    machine.start()
    machine.document(60, [1], True, [2])
    machine.read("v", HEADS[0], 3, [1], -1)
    _, tokens, lineage = machine.others[0]
    assert lineage == ()
    path = machine.engine.cache.match(fold_keys(tokens)).slots
    assert len(path) == len(tokens)
    assert not machine.tainted[path].any()


TestReuse = ReuseMachine.TestCase
TestReuse.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
TestGated = GatedMachine.TestCase
TestGated.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)
