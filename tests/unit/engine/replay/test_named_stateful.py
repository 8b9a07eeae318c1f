"""Readers of the secret, where every request names a place of its content, found or gone."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import settings
from support.examples import examples
from support.replay_engine import SCOPE
from test_reuse_stateful import DOCUMENT, HEADS, ReuseMachine

from leyline_engine.contract import CopySegment, EditPayload, ReuseMode, ReusePayload, SourceRef
from leyline_engine.records.lineage import fold_keys
from leyline_engine.records.sources import SourceTurn
from leyline_engine.reuse.fingerprints import MatcherKind
from leyline_replay.sequence import Sequence

MARK = DOCUMENT[20:44]
"""A part of the document that every reader of it has."""


class NamingMachine(ReuseMachine):
    """The engine searches for nothing; it is told where the document was, forgotten or not."""

    matcher = MatcherKind.OFF
    tenants: ClassVar = {"v": SCOPE, "w": SCOPE}

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[tuple[str, str], SourceTurn] = {}

    def _admit(self, tokens: list[int], payload: EditPayload) -> Sequence:
        self.asked = self._names(tokens)
        return super()._admit(tokens, payload)

    def _names(self, tokens: list[int]) -> ReusePayload:
        """A place of the document in a turn that the engine retains, or did once."""
        for session in ("s", "z", "v", "w"):
            for turn in self.engine.cache.registry.turns((SCOPE, session)):
                self.known[session, turn.turn] = turn
        places = [(turn, place_of(list(turn.tokens))) for turn in self.known.values()]
        held = [(turn, place) for turn, place in places if place is not None]
        dest = place_of(tokens)
        if dest is None or not held:
            return ReusePayload(mode=ReuseMode.LIVE)
        turn, place = held[self.count * 7 % len(held)]
        source = SourceRef(turn.turn, len(turn.tokens), turn.digest, turn.session)
        copy = CopySegment(0, place, place + len(MARK), dest)
        return ReusePayload(mode=ReuseMode.LIVE, sources=(source,), copies=(copy,))


def place_of(tokens: list[int]) -> int | None:
    """The place of the mark in a sequence."""
    ends = range(len(tokens) - len(MARK) + 1)
    return next((at for at in ends if tokens[at : at + len(MARK)] == MARK), None)


def test_the_machine_names_what_it_means_to() -> None:
    """KV that has read the secret is copied by name, and a forget takes it out."""
    machine = NamingMachine()
    machine.start()
    machine.document(60, [1], True, [2])
    machine.read("v", HEADS[0], 3, [1], -1)
    machine.read("w", HEADS[1], 5, [2], -1)
    kept = [fold_keys(tokens, lineage, SCOPE) for _, tokens, lineage in machine.others]
    for keys in kept:
        assert machine.tainted[machine.engine.cache.match(keys).slots].any()
    machine.forget_by_name(0, [1], True, True, False)
    for keys in kept:
        assert machine.engine.cache.match(keys).length <= len(HEADS[0]) + 1
    machine.what_is_forgotten_stays_forgotten()
    machine.read("v", HEADS[2], 3, [1], -1)
    machine.what_is_forgotten_stays_forgotten()


TestNaming = NamingMachine.TestCase
TestNaming.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)
