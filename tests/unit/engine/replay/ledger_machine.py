"""A machine in which every span has a name, and some KV is shared with a second session.

Spans are named by their tokens, so the secret is one span in any place.
"""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from support.replay_engine import SCOPE
from taint_machine import PIECES, SECRET, TaintMachine

from leyline_engine.contract import (
    Directive,
    EditPayload,
    LineageRun,
    SourceRef,
    SpanLabel,
    apply_directives,
    lower_directives,
    token_digest,
)
from leyline_engine.records.sources import SourceTurn

SHARE = "both"


def span_name(token: int) -> str:
    """The span that a token belongs to."""
    return f"v{token}"


class LedgerMachine(TaintMachine):
    """Session y never sends the secret, but sees what session s shares."""

    def labelled(self, payload: EditPayload, tokens: list[int]) -> EditPayload:
        """Every token has its label."""
        spans = tuple(SpanLabel(span_name(t), i, i + 1) for i, t in enumerate(tokens))
        return msgspec.structs.replace(payload, spans=spans)

    def _retained(self, session: str) -> tuple[SourceTurn, ...]:
        return self.engine.cache.registry.turns((SCOPE, session))

    def _never_read(self) -> set[str]:
        """Retained turns of session s whose KV is all cached and hasn't read the secret.

        Empty where the ledger has never heard of the secret, for then nothing is known, and once
        anything was shared: a shared lineage covers several sequences, and what one of them has
        read counts for all.
        """
        found: set[str] = set()
        shared = any(self.engine.cache.ledger.shared_starts(SCOPE, SHARE))
        if shared or not self.engine.cache.ledger.knows((SCOPE, "s"), [span_name(SECRET)]):
            return found
        for turn in self._retained("s"):
            match = self.engine.cache.match(turn.keys())
            whole = match.length >= len(turn.tokens) - 1
            if whole and SECRET not in turn.tokens and not self.tainted[match.slots].any():
                found.add(turn.turn)
        return found

    @precondition(lambda self: self.turns)
    @rule(
        which=st.integers(0, 7),
        tail=PIECES,
        known=st.booleans(),
        splice=st.booleans(),
        share=st.booleans(),
    )
    def forget_by_name(
        self, which: int, tail: list[int], known: bool, splice: bool, share: bool
    ) -> None:
        """Forget the secret wherever it was; turns that never read it stay."""
        name, tokens, lineage = self.turns[which % len(self.turns)]
        cuts = [Directive(at, at + 1) for at, token in enumerate(tokens) if token == SECRET]
        prompt = [*apply_directives(tokens, cuts), *tail, 7]
        payload = msgspec.structs.replace(
            self._payload("s", lineage if known else ()),
            forget=(span_name(SECRET),),
            share=SHARE if share else "",
        )
        if splice:
            payload = msgspec.structs.replace(
                payload,
                sources=(SourceRef(name, len(tokens), token_digest(tokens)),),
                directives=tuple(cuts),
                segments=lower_directives(cuts, len(tokens), len(prompt)),
            )
        never_read = self._never_read()
        sequence = self._admit(prompt, payload)
        assert never_read <= {turn.turn for turn in self._retained("s")}
        self._complete(sequence, prompt, decode=1)
        self.forgotten = True
        left = {turn.turn for turn in self._retained("s")}
        self.turns = [turn for turn in self.turns if turn[0] in left]
        if not self.running:
            assert not self.engine.cache.tree.doomed()
            assert sequence.receipt.forgot is not None and sequence.receipt.forgot.pending == 0

    @precondition(lambda self: self.turns)
    @rule(which=st.integers(0, 7), tail=PIECES, cut=st.integers(30, 60))
    def amortize_and_share(self, which: int, tail: list[int], cut: int) -> None:
        """A cut whose suffix the second session may see."""
        name, tokens, lineage = self.turns[which % len(self.turns)]
        at = tokens.index(SECRET) if SECRET in tokens else min(cut, len(tokens) - 1)
        self._share("s", (name, tokens, lineage), [Directive(at, at + 1)], tail)

    @precondition(lambda self: self._retained("y"))
    @rule(
        which=st.integers(0, 7),
        tail=PIECES,
        cut=st.integers(30, 60),
        share=st.booleans(),
        steps=st.integers(-1, 9),
    )
    def sharer_amortizes(
        self, which: int, tail: list[int], cut: int, share: bool, steps: int
    ) -> None:
        """The second session moves on what it found, in a lineage of its own or shared again."""
        turns = self._retained("y")
        source = turns[which % len(turns)]
        turn = (source.turn, source.tokens.tolist(), source.lineage)
        if SECRET not in turn[1]:
            at = min(cut, len(source.tokens) - 2)
            self._share("y", turn, [Directive(at, at + 2)], tail, share=share, steps=steps)

    @precondition(lambda self: self.turns and len(self.running) < 3)
    @rule(which=st.integers(0, 7), tail=PIECES, steps=st.integers(0, 9), leave=st.booleans())
    def sharer_extends(self, which: int, tail: list[int], steps: int, leave: bool) -> None:
        """The second session sends the tokens of a turn itself, as far as they hold no secret."""
        _, tokens, _ = self.turns[which % len(self.turns)]
        end = tokens.index(SECRET) if SECRET in tokens else 110
        prompt = [*tokens[:end], *tail, 6]
        payload = msgspec.structs.replace(self._payload("y"), share=SHARE)
        if leave:
            self._begin(prompt, payload, steps)
        else:
            self._run(prompt, payload, decode=1)

    def _share(
        self,
        session: str,
        turn: tuple[str, list[int], tuple[LineageRun, ...]],
        directives: list[Directive],
        tail: list[int],
        *,
        share: bool = True,
        steps: int = -1,
    ) -> None:
        """Amortize, to the end or so many chunks of it."""
        name, tokens, lineage = turn
        prompt = [*apply_directives(tokens, directives), *tail, 7]
        payload = msgspec.structs.replace(
            self._payload(session, lineage),
            sources=(SourceRef(name, len(tokens), token_digest(tokens)),),
            directives=tuple(directives),
            segments=lower_directives(directives, len(tokens), len(prompt)),
            share=SHARE if share else "",
        )
        if steps >= 0 and len(self.running) < 3:
            self._begin(prompt, payload, steps)
        else:
            self._run(prompt, payload, decode=1)
