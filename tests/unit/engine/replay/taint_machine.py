"""Readers of the secret, followed slot by slot beside the engine, at random."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.replay_engine import SCOPE, ids, make_engine, prefill, random_tokens
from taint_kit import Taint

from leyline_engine.contract import (
    Directive,
    EditPayload,
    LineageRun,
    Mode,
    ReusePayload,
    SourceRef,
    apply_directives,
    lower_directives,
    token_digest,
)
from leyline_engine.records.lineage import MAX_TOKEN
from leyline_engine.reuse.fingerprints import MatcherKind
from leyline_replay.cache.radix import Node
from leyline_replay.engine import GenerationRequest, ReplayEngine
from leyline_replay.sequence import Sequence

SECRET = 200
STEM = [token for token in random_tokens(60, 11) if token != SECRET]
PIECES = st.lists(st.integers(1, 4), max_size=6)
MAX_TURNS = 8


class TaintMachine(RuleBasedStateMachine):
    """Session s sends the secret; session z shares its stem and never does."""

    asked: ReusePayload | None = None
    """What every request asks for."""
    matcher = MatcherKind.WINNOW
    page = 1

    @initialize()
    def start(self) -> None:
        self.engine: ReplayEngine = make_engine(
            pool=2500, page=self.page, chunk=16, matcher=self.matcher
        )
        self.taint = Taint(self.engine, SECRET)
        self.tainted = self.taint.flags
        self.turns: list[tuple[str, list[int], tuple[LineageRun, ...]]] = []
        self.count = 0
        self.running: list[tuple[Sequence, list[int]]] = []
        self.forgotten = True

    def labelled(self, payload: EditPayload, tokens: list[int]) -> EditPayload:
        """The payload as it is sent; here it says nothing of spans."""
        return payload

    def _admit(self, tokens: list[int], payload: EditPayload) -> Sequence:
        """Admit a request, and have its forwards spread the flags."""
        payload = self.labelled(payload, tokens)
        sequence = self.engine.admit(
            GenerationRequest(payload.turn, ids(tokens), payload, self.asked, max_new_tokens=4)
        )
        if SECRET in tokens:
            self.forgotten = False
        return self.taint.follow(sequence)

    def _run(self, tokens: list[int], payload: EditPayload, decode: int) -> None:
        self._complete(self._admit(tokens, payload), tokens, decode)

    def _complete(self, sequence: Sequence, tokens: list[int], decode: int) -> None:
        logits = prefill(sequence)
        fed = []
        for _ in range(decode):
            best, second = logits.topk(2).indices.tolist()
            fed.append(second if best == SECRET else best)
            logits = sequence.decode_step(fed[-1])
        if not sequence.lineage:
            influenced = bool(self.tainted[sequence.held].any())
            assert influenced == (SECRET in [*tokens, *fed])
        receipt = sequence.finish().receipt
        if receipt.session == "s" and receipt.turn:
            kept = (receipt.turn, [*tokens, *fed], receipt.lineage)
            self.turns = [*self.turns, kept][-MAX_TURNS:]

    def _payload(self, session: str, lineage: tuple[LineageRun, ...] = ()) -> EditPayload:
        self.count += 1
        return EditPayload(session=session, scope=SCOPE, turn=f"t{self.count}", lineage=lineage)

    @rule(cut=st.integers(30, 60), before=PIECES, secret=st.booleans(), after=PIECES)
    def fresh(self, cut: int, before: list[int], secret: bool, after: list[int]) -> None:
        tokens = [*STEM[:cut], *before, *([SECRET] if secret else []), *after, 5]
        self._run(tokens, self._payload("s"), decode=1)

    @rule(cut=st.integers(30, 60), after=PIECES)
    def neighbour(self, cut: int, after: list[int]) -> None:
        self._run([*STEM[:cut], *after, 5], self._payload("z"), decode=0)

    @precondition(lambda self: self.turns)
    @rule(which=st.integers(0, 7), tail=PIECES, known=st.booleans())
    def extend(self, which: int, tail: list[int], known: bool) -> None:
        _, tokens, lineage = self.turns[which % len(self.turns)]
        payload = self._payload("s", lineage if known else ())
        self._run([*tokens[:110], *tail, 6], payload, decode=1)

    @precondition(lambda self: len(self.running) < 3)
    @rule(cut=st.integers(30, 60), before=PIECES, after=PIECES, steps=st.integers(0, 9))
    def leave_running(self, cut: int, before: list[int], after: list[int], steps: int) -> None:
        tokens = [*STEM[:cut], *before, SECRET, *after, 5]
        self._begin(tokens, self._payload("s"), steps)

    @precondition(lambda self: self.turns and len(self.running) < 3)
    @rule(which=st.integers(0, 7), tail=PIECES, steps=st.integers(0, 9))
    def leave_extension_running(self, which: int, tail: list[int], steps: int) -> None:
        _, tokens, lineage = self.turns[which % len(self.turns)]
        self._begin([*tokens[:110], *tail, 6], self._payload("s", lineage), steps)

    def _begin(self, tokens: list[int], payload: EditPayload, steps: int) -> None:
        sequence = self._admit(tokens, payload)
        for _ in range(min(steps, len(sequence.pending))):
            sequence.prefill_step()
        self.running.append((sequence, tokens))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 2), complete=st.booleans())
    def end_running(self, which: int, complete: bool) -> None:
        sequence, tokens = self.running.pop(which % len(self.running))
        if complete and sequence.pending:
            self._complete(sequence, tokens, decode=1)
        else:
            sequence.abort()
        if not self.running:
            assert not any(counts.pending for counts in self.engine.settled_forgets().values())

    def _edit(self, which: int, directives: list[Directive], tail: list[int], known: bool) -> None:
        name, tokens, lineage = self.turns[which]
        forgetting = any(d.mode is Mode.FORGET for d in directives)
        prompt = [*apply_directives(tokens, directives), *tail, 7]
        payload = EditPayload(
            session="s",
            scope=SCOPE,
            turn=self._payload("s").turn,
            sources=(SourceRef(name, len(tokens), token_digest(tokens)),),
            directives=tuple(directives),
            segments=lower_directives(directives, len(tokens), len(prompt)),
            lineage=lineage if known else (),
        )
        if forgetting:
            self.turns = []
        self._run(prompt, payload, decode=1)

    @precondition(lambda self: self.turns)
    @rule(data=st.data(), which=st.integers(0, 7), tail=PIECES, known=st.booleans())
    def amortize(self, data: st.DataObject, which: int, tail: list[int], known: bool) -> None:
        which %= len(self.turns)
        tokens = self.turns[which][1]
        cuts = sorted(data.draw(st.sets(st.integers(30, len(tokens)), max_size=4)))
        spans = [(s, t) for s, t in zip(cuts[::2], cuts[1::2], strict=False)]
        if SECRET in tokens and data.draw(st.booleans()):
            at = tokens.index(SECRET)
            spans = [(at, at + 1)]
        self._edit(which, [Directive(s, t) for s, t in spans], tail, known)

    @precondition(lambda self: any(SECRET in tokens for _, tokens, _ in self.turns))
    @rule(which=st.integers(0, 7), earlier=st.integers(30, 40), tail=PIECES)
    def forget(self, which: int, earlier: int, tail: list[int]) -> None:
        holding = [i for i, (_, tokens, _) in enumerate(self.turns) if SECRET in tokens]
        which = holding[which % len(holding)]
        tokens = self.turns[which][1]
        directives = [
            Directive(at, at + 1, (), Mode.FORGET)
            for at, token in enumerate(tokens)
            if token == SECRET
        ]
        first = directives[0].start
        if earlier + 2 <= first:
            directives.insert(0, Directive(earlier, earlier + 2))
        self._edit(which, directives, tail, known=True)
        self.forgotten = True
        if not self.running:
            assert not self.engine.cache.tree.doomed()

    @invariant()
    def what_is_forgotten_stays_forgotten(self) -> None:
        """After a forget no node remembers the secret, spliced ones included, till it's resent."""
        if hasattr(self, "engine") and self.forgotten:
            nodes = self.engine.cache.tree.nodes()
            assert not any(self.tainted[node.slots].any() for node in nodes)
            if not self.running:
                assert not self.tainted.any(), "not in free slots either"

    @invariant()
    def exact_keys_hold_exact_kv(self) -> None:
        """Under exact keys the flag is what the keys say; nothing remembers what they don't."""
        if not hasattr(self, "engine"):
            return
        self.engine.check_integrity()

        def walk(node: Node, seen: bool) -> None:
            for key, slot in zip(node.keys, node.slots.tolist(), strict=True):
                if key > MAX_TOKEN:
                    return
                seen = seen or key == SECRET
                assert self.tainted[slot] == seen
            for child in node.children.values():
                walk(child, seen)

        walk(self.engine.cache.tree.root, False)
