"""Random sessions against SGLang's own tree, allocator and admission.

Whatever the mix of appends, edits, forgets, branches, shared splices, reuse, aborts, retractions,
flushes and memory pressure: no slot is lost, every key is where it should be, plain requests never
see KV that remembers more than their own tokens, nothing is stuck, and what was forgotten is in no
slot as soon as the forget's receipt is closed.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from random import Random

import pytest
from draft_scheduler import DraftScheduler
from hosted_scheduler import HostedScheduler
from scheduler_kit import SALT, SECRETS, VOCABULARY, Scheduler, source_of
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req

from leyline_engine.contract import (
    Directive,
    EditPayload,
    LineageRun,
    Mode,
    Outcome,
    RecurrentEdits,
    ReuseMode,
    ReusePayload,
    SourceRef,
    SpanLabel,
    apply_directives,
    output_span,
    token_array,
    token_digest,
)
from leyline_engine.records.lineage import share_lineage
from leyline_engine.sglang.stage_row import StageRow

pytestmark = pytest.mark.usefixtures("server_args")

LIVE = ReusePayload(mode=ReuseMode.LIVE, groups=("docs",))
OBSERVE = ReusePayload(mode=ReuseMode.OBSERVE, groups=("docs",))
CREW = "crew"
"""The name under which sessions of a tenant share some of their splices."""
CREWS = share_lineage(CREW, salt=SALT)


@dataclass
class Session:
    """A proxy's knowledge of a conversation."""

    name: str
    scope: str
    tokens: array[int] = field(default_factory=lambda: array("q"))
    labels: tuple[SpanLabel, ...] = ()
    turn: str = ""
    lineage: tuple[LineageRun, ...] = ()
    turns: int = 0
    spans: int = 0
    secrets: dict[int, str] = field(default_factory=dict)
    """Spans that hold secrets, by secret."""
    req: Req | None = None
    message_id: str = ""
    forgetting: tuple[str, ...] = ()
    sent: tuple[SpanLabel, ...] = ()
    """Labels of the turn under way."""
    past: list[str] = field(default_factory=list)
    """Turns before the last one."""
    joined: bool = False
    """True if the turn under way draws on KV that another session shared."""
    resent: set[int] = field(default_factory=set)
    """Secrets that the session's other requests sent while it is under way."""


class Driver:
    """Sessions that take random turns.

    Args:
        reuses: True if turns quote documents, and most ask for reuse.
    """

    def __init__(
        self, seed: int, scheduler: Scheduler, sessions: int = 4, *, reuses: bool = False
    ) -> None:
        self.rng = Random(seed)
        self.scheduler = scheduler
        self.reuses = reuses
        self.copied = 0
        """Turns that were served content of another place or session."""
        self.sessions = [Session(f"s{i}", f"tenant{i % 2}") for i in range(sessions)]
        self.secret = SECRETS
        self.spliced = self.forgot = self.reused = self.aborted = self.shared = 0
        self.forgotten: set[int] = set()
        """Secrets that no slot may have read."""
        self.open: dict[str, set[int]] = {}
        """The secrets forgotten by receipts that aren't closed."""
        self.opening = self.text(40)
        self.documents = [self.text(90) for _ in range(2)]

    def text(self, length: int) -> array[int]:
        return array("q", [self.rng.randrange(VOCABULARY) for _ in range(length)])

    def run(self, steps: int) -> None:
        """Take ``steps`` random steps, then finish what is under way."""
        for _ in range(steps):
            choice = self.rng.random()
            idle = [s for s in self.sessions if s.req is None]
            if choice < 0.36 and idle:
                self.take_turn(self.rng.choice(idle))
            elif choice < 0.39:
                self.branch(self.rng.choice(self.sessions))
            elif choice < 0.42 and idle:
                self.join(self.rng.choice(idle))
            elif choice < 0.45:
                self.plain()
            elif choice < 0.5:
                self.abort()
            elif choice < 0.53 and self.scheduler.running:
                self.scheduler.retract(self.rng.choice(self.scheduler.running))
            else:
                self.scheduler.step()
            self.collect()
            self.check_forgotten()
        self.scheduler.drain()
        self.collect()
        self.check_forgotten()
        assert not self.open
        self.scheduler.check_idle()

    def plain(self) -> None:
        """Somebody without an envelope sends what a session has, or had."""
        session = self.rng.choice(self.sessions)
        if not set(session.tokens) & set(session.secrets):
            self.scheduler.submit([*(session.tokens or self.opening), *self.text(3)])

    def abort(self) -> None:
        waiting = [r for r in self.scheduler.waiting if self.rng.random() < 0.5]
        running = [r.req for r in self.scheduler.running if self.rng.random() < 0.3]
        chunked = self.scheduler.chunked
        between = [] if chunked is None or isinstance(chunked, StageRow) else [chunked]
        for req in [*between, *waiting, *running][:1]:
            self.aborted += 1
            self.scheduler.abort(req)
            for session in self.sessions:
                if session.req is req and req in waiting:
                    session.req = None

    def collect(self) -> None:
        """Learn what a proxy learns of turns that ended."""
        for session in self.sessions:
            req = session.req
            if req is None or not req.finished():
                continue
            session.req = None
            record = self.scheduler.sender.records[session.message_id]
            receipt = record.receipt
            assert record.finished
            counts = receipt.tokens
            assert counts.prompt == counts.served + counts.prefilled
            if receipt.reuse is not None and receipt.reuse.mode is ReuseMode.LIVE:
                assert counts.reused == receipt.reuse.total
                self.copied += counts.reused > 0
            self.spliced += receipt.outcome is Outcome.SPLICED
            if session.forgetting:
                assert receipt.forgot is not None
                gone = {s for s, name in session.secrets.items() if name in session.forgetting}
                gone -= {*req.origin_input_ids, *session.resent}
                self.open[session.message_id] = gone
                session.secrets = {s: n for s, n in session.secrets.items() if s not in gone}
            if isinstance(req.finished_reason, FINISH_ABORT):
                continue
            self.reused += receipt.tokens.prefix
            runs = {run.start for run in receipt.lineage if run.lineage == CREWS}
            self.shared += bool(session.joined and runs and receipt.tokens.prefix > min(runs))
            assert list(record.output_ids) == list(req.output_ids)
            prompt = len(req.origin_input_ids)
            session.tokens = source_of(req)
            session.lineage = receipt.lineage
            if receipt.turn:
                session.turn = receipt.turn
                written = SpanLabel(output_span(receipt.turn), prompt, len(session.tokens))
                session.labels = (*session.sent, written)
            else:
                session.turn = ""
                session.labels = (*session.sent, self.span(session, prompt, len(session.tokens)))

    def check_forgotten(self) -> None:
        """Check that text forgotten by a receipt is in no slot, free ones included."""
        sender, closed = self.scheduler.sender, []
        for message_id in self.open:
            forgot = sender.forgotten.get(message_id, sender.records[message_id].receipt.forgot)
            if forgot is not None and not forgot.pending:
                closed.append(message_id)
        if not closed:
            return
        for message_id in closed:
            self.forgotten |= self.open.pop(message_id)
        self.forgot += len(closed)
        left = self.forgotten & self.scheduler.everywhere()
        assert not left, f"{len(left)} forgotten secrets are still held"

    def send(self, tokens: array[int], payload: EditPayload, message_id: str) -> Req:
        """Queue a request; what it shows is not forgotten any more."""
        shown = set(tokens)
        self.forgotten -= shown
        for gone in self.open.values():
            gone.difference_update(shown)
        decode = self.rng.randint(1, 4)
        reuse = self.rng.choice([LIVE, LIVE, LIVE, OBSERVE, None]) if self.reuses else None
        return self.scheduler.submit(
            tokens, payload, decode=decode, message_id=message_id, reuse=reuse
        )

    def branch(self, session: Session) -> None:
        """Another request of a session, whatever it has under way; no turn follows on it."""
        if not session.tokens:
            return
        added = self.text(self.rng.randint(3, 12))
        tokens = session.tokens + added
        labels = (*session.labels, self.span(session, len(session.tokens), len(tokens)))
        session.turns += 1
        turn = f"t{session.turns}"
        payload = EditPayload(
            session=session.name,
            scope=session.scope,
            turn=turn,
            lineage=session.lineage,
            spans=labels,
        )
        session.resent |= {token for token in tokens if token >= SECRETS}
        self.send(tokens, payload, f"{session.name}.{turn}")

    def join(self, session: Session) -> None:
        """A session takes up what another one of its tenant shares, as far as no secret shows."""
        for other in self.sessions:
            starts = [run.start for run in other.lineage if run.lineage == CREWS]
            clean = next((i for i, t in enumerate(other.tokens) if t >= SECRETS), len(other.tokens))
            other_one = other is not session and other.scope == session.scope
            if other_one and starts and clean > starts[0] + 5:
                break
        else:
            return
        session.tokens = other.tokens[:clean]
        session.labels = (self.span(session, 0, len(session.tokens)),)
        session.lineage, session.turn, session.secrets = (), "", {}
        self.take_turn(session, share=CREW)

    def span(self, session: Session, start: int, end: int) -> SpanLabel:
        session.spans += 1
        return SpanLabel(f"{session.name}.{session.spans}", start, end)

    def take_turn(self, session: Session, share: str = "") -> None:
        """An append, an edit or a forget; sometimes the conversation starts again."""
        long = len(session.tokens) > (260 if self.scheduler.page < 64 else 700)
        if not session.tokens or (not share and (long or self.rng.random() < 0.05)):
            session.tokens = array("q", self.opening)
            session.labels = (SpanLabel("opening", 0, len(self.opening)),)
            session.lineage, session.turn, session.secrets = (), "", {}
        tokens, labels, directives = session.tokens, session.labels, ()
        forget: tuple[str, ...] = ()
        if session.turn and self.rng.random() < 0.7:
            directives, forget = self.edits(session)
            tokens = token_array(apply_directives(session.tokens, directives))
            labels = self.moved(session, directives)
        added = self.text(self.rng.randint(3, 30))
        if self.rng.random() < 0.4:
            self.secret += 1
            added[self.rng.randrange(len(added))] = self.secret
        if self.reuses and self.rng.random() < 0.5:
            added += self.rng.choice(self.documents)[self.rng.randrange(20) :]
        start = len(tokens)
        tokens = tokens + added
        new = self.span(session, start, len(tokens))
        session.secrets |= {token: new.span for token in added if token >= SECRETS}
        labels = (*labels, new)
        session.turns += 1
        turn = f"t{session.turns}"
        session.past.append(turn)
        # Later turns draw on the last one alone, which this one may retire, too.
        retire = tuple(session.past[:-1]) if self.rng.random() < 0.15 else ()
        sources = ()
        if directives:
            source = SourceRef(session.turn, len(session.tokens), token_digest(session.tokens))
            sources = (source,)
            share = CREW if self.rng.random() < 0.6 else ""
        payload = EditPayload(
            session=session.name,
            scope=session.scope,
            turn=turn,
            sources=sources,
            directives=directives,
            lineage=session.lineage,
            spans=labels,
            forget=forget,
            retire=retire,
            share=share,
            recurrent=RecurrentEdits.KEPT,
        )
        session.message_id = f"{session.name}.{turn}"
        session.forgetting = forget
        session.resent, session.joined = set(), bool(share and not directives)
        session.sent = labels
        session.req = self.send(tokens, payload, session.message_id)
        session.turn = ""

    def edits(self, session: Session) -> tuple[tuple[Directive, ...], tuple[str, ...]]:
        """Random directives on the last turn; a forgotten span goes whole."""
        length = len(session.tokens)
        names = [label for label in session.labels if label.span in session.secrets.values()]
        if names and self.rng.random() < 0.4:
            label = self.rng.choice(names)
            return (Directive(label.start, label.end, (), Mode.FORGET),), (label.span,)
        cuts = sorted(self.rng.sample(range(34, length), k=min(4, length - 34)))
        directives = []
        for start, end in zip(cuts[::2], cuts[1::2], strict=False):
            if self.rng.random() < 0.7:
                length = self.rng.randint(0, 3)
                directives.append(Directive(start, end, tuple(self.text(length))))
        return tuple(directives), ()

    def moved(self, session: Session, directives: tuple[Directive, ...]) -> tuple[SpanLabel, ...]:
        """The labels of the edited text; one that was cut whole is empty."""

        def at(position: int) -> int:
            shift = 0
            for d in directives:
                if position >= d.end:
                    shift += d.delta
                elif position > d.start:
                    return d.start + shift + min(position - d.start, len(d.replacement))
            return position + shift

        labels = [SpanLabel(label.span, at(label.start), at(label.end)) for label in session.labels]
        covered = []
        for label in labels:
            start = covered[-1].end if covered else 0
            covered.append(SpanLabel(label.span, min(start, label.start), label.end))
        return tuple(covered)


KINDS = {"drafts": DraftScheduler, "hosted": HostedScheduler}
VARIANTS = [
    pytest.param({"core": "rust"}, id="rust"),
    pytest.param({"core": "python"}, id="python", marks=pytest.mark.nightly),
    pytest.param({"core": "rust", "events": True}, id="events", marks=pytest.mark.nightly),
    pytest.param({"core": "rust", "overlap": True, "capacity": 460, "chunk": 32}, id="overlap"),
    pytest.param(
        {"core": "python", "overlap": True, "drafts": True, "page": 16},
        id="overlap-drafts-page-16",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        {"overlap": True, "hosted": True, "capacity": 520, "delay": 3},
        id="overlap-hosted",
        marks=pytest.mark.nightly,
    ),
    pytest.param({"core": "rust", "capacity": 420}, id="pressure", marks=pytest.mark.nightly),
    pytest.param({"core": "rust", "chunk": 24}, id="chunked", marks=pytest.mark.nightly),
    pytest.param(
        {"core": "rust", "capacity": 460, "chunk": 32},
        id="chunked-pressure",
        marks=pytest.mark.nightly,
    ),
    pytest.param({"core": "rust", "reuses": True}, id="reuse", marks=pytest.mark.nightly),
    pytest.param(
        {"core": "rust", "capacity": 1000, "chunk": 32, "reuses": True},
        id="reuse-pressure",
        marks=pytest.mark.nightly,
    ),
    pytest.param({"core": "rust", "page": 16}, id="page-16", marks=pytest.mark.nightly),
    pytest.param({"core": "python", "page": 16}, id="page-16-python", marks=pytest.mark.nightly),
    pytest.param({"core": "rust", "page": 64}, id="page-64", marks=pytest.mark.nightly),
    pytest.param(
        {"core": "rust", "page": 16, "capacity": 640, "chunk": 40},
        id="page-16-pressure",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        {"core": "rust", "page": 16, "capacity": 1280, "chunk": 32, "reuses": True},
        id="page-16-reuse",
    ),
    pytest.param({"core": "rust", "drafts": True}, id="drafts", marks=pytest.mark.nightly),
    pytest.param(
        {"core": "python", "drafts": True, "events": True},
        id="drafts-python",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        {"core": "rust", "drafts": True, "capacity": 460, "chunk": 32},
        id="drafts-pressure",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        {"core": "rust", "drafts": True, "capacity": 1280, "chunk": 32, "reuses": True, "page": 16},
        id="drafts-page-16-reuse",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        {"core": "rust", "drafts": True, "page": 64}, id="drafts-page-64", marks=pytest.mark.nightly
    ),
    pytest.param({"hosted": True, "capacity": 460, "chunk": 32, "delay": 3}, id="hosted-pressure"),
    pytest.param(
        {"hosted": True, "capacity": 520, "policy": "write_back", "ratio": 1.5},
        id="hosted-write-back",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        {"hosted": True, "capacity": 1280, "page": 16, "reuses": True, "delay": 2, "ratio": 0.5},
        id="hosted-page-16-reuse",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        {"hosted": True, "capacity": 900, "policy": "write_through_selective", "ratio": 0.3},
        id="hosted-selective",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        {"hosted": True, "capacity": 1280, "page": 64, "delay": 5},
        id="hosted-page-64",
        marks=pytest.mark.nightly,
    ),
]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.nightly) for s in (1, 2))])
def test_random_sessions(variant: dict[str, object], seed: int) -> None:
    """Slots, keys, memories and phases hold over hundreds of random steps."""
    reuses = bool(variant.get("reuses"))
    kind = next((KINDS[name] for name in KINDS if name in variant), Scheduler)
    options = {name: value for name, value in variant.items() if name not in {"reuses", *KINDS}}
    scheduler = kind(**options)  # type: ignore[arg-type]
    driver = Driver(seed, scheduler, reuses=reuses)
    driver.run(1000)
    assert driver.copied > 5 or not reuses
    # With larger pages, an edit has less to copy.
    assert driver.spliced > (5 if scheduler.page == 1 else 1)
    assert driver.reused > 500
    assert driver.forgot > (5 if scheduler.page == 1 else 1)
    assert scheduler.seen.retired_tokens > 0
    scheduler.flush()
    assert scheduler.allocator.available_size() == scheduler.capacity
