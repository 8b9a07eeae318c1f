"""Random sessions against one vLLM engine, several at once: a proxy's and the reference's view."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from random import Random
from typing import Any

from contract_kit import BOUND, distance, expect
from oracle_models import OracleModel
from oracle_reference import Fresh, Keep, Piece, Remembered
from secret_rows import ORDINARY, SECRETS, SecretRows, draw_ordinary
from splice_kit import Answer, SplicingEngine

from leyline_engine.contract import (
    Directive,
    EditPayload,
    LineageRun,
    Outcome,
    Reason,
    SpanLabel,
    apply_directives,
)


@dataclass(eq=False)
class Session:
    """A conversation."""

    name: str
    scope: str
    last: Answer | None = None
    """The last turn; None before the first, and after one that has no answer."""
    turn: str = ""
    truth: Remembered | None = None
    """The last turn as the reference remembers it."""
    lineage: tuple[LineageRun, ...] = ()
    spans: tuple[SpanLabel, ...] = ()
    secrets: dict[int, str] = field(default_factory=dict)
    """By secret, the span that has it."""
    begun: int = 0


@dataclass(eq=False)
class Running:
    """A request under way."""

    name: str
    prompt: tuple[int, ...]
    session: Session | None = None
    source: Remembered | None = None
    payload: EditPayload | None = None
    spans: tuple[SpanLabel, ...] = ()
    copies: tuple[Any, ...] | None = None
    """The copies of its plan, once it runs."""
    preempted: int = 0


class Driver:
    """Takes random steps.

    Args:
        priorities: True if requests have random priorities.
    """

    def __init__(
        self, seed: int, engine: SplicingEngine, subject: OracleModel, *, priorities: bool = False
    ) -> None:
        self.rng = Random(seed)
        self.engine = engine
        self.subject = subject
        self.rows = SecretRows(engine, subject)
        self.priorities = priorities
        self.opening = draw_ordinary(self.rng, 45)
        self.seed = seed
        self.sessions = [self._session(at) for at in range(3)]
        self.running: dict[str, Running] = {}
        self.secret = iter(self.rng.sample(SECRETS, len(SECRETS)))
        self.open: dict[str, set[int]] = {}
        """By forget whose receipt isn't closed, the secrets that must go."""
        self.gone: set[int] = set()
        """Secrets that no slot may hold."""
        self.spliced = self.staged = self.forgot = self.preempted = self.aborted = 0
        self.compared = self.failed = 0
        self._watch()

    def _session(self, at: int) -> Session:
        return Session(f"{self.seed}.{at}.{self.rng.random()}", f"t{at % 2}")

    def _watch(self) -> None:
        """Learn each turn's plan, and each preemption."""
        accounts, scheduler = self.engine.leyline._accounts, self.engine.scheduler
        admitted, preempt = accounts.admitted, scheduler._preempt_request

        def noted(turn: Any) -> None:
            mine = self.running.get(turn.message_id)
            if mine is not None:
                mine.copies = turn.plan.copies
            admitted(turn)

        def preempting(request: Any, *args: Any, **options: Any) -> None:
            mine = self.running.get(request.request_id.rpartition("-")[0])
            if mine is not None:
                mine.preempted += 1
            self.preempted += 1
            preempt(request, *args, **options)

        accounts.admitted, scheduler._preempt_request = noted, preempting
        self._unwatch = lambda: (
            accounts.__dict__.pop("admitted"),
            scheduler.__dict__.pop("_preempt_request"),
        )

    def run(self, steps: int) -> None:
        """Take ``steps`` random steps, then finish what is under way."""
        for _ in range(steps):
            choice = self.rng.random()
            idle = [s for s in self.sessions if not self._busy(s)]
            if choice < 0.22 and idle:
                self.take_turn(self.rng.choice(idle))
            elif choice < 0.25:
                self.plain()
            elif choice < 0.28 and self.running:
                self.abort(self.rng.choice(list(self.running.values())))
            elif choice < 0.31 and self.engine.scheduler.running:
                self.preempt(self.rng.choice(self.engine.scheduler.running))
            else:
                self.step()
        while self.engine.scheduler.has_requests():
            self.step()
        assert not self.running
        self.check_forgotten()
        assert not self.open
        self._unwatch()

    def _busy(self, session: Session) -> bool:
        return any(each.session is session for each in self.running.values())

    def step(self) -> None:
        for output in self.engine.llm.llm_engine.step():
            if output.finished:
                self.collect(self.running.pop(output.request_id), output)
        self.check_forgotten()

    def preempt(self, request: Any) -> None:
        """Take a request's blocks, as vLLM does to reset its cache while requests run."""
        scheduler = self.engine.scheduler
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)

    def abort(self, mine: Running) -> None:
        del self.running[mine.name]
        self.engine.llm.llm_engine.abort_request([mine.name])
        self.aborted += 1
        if mine.session is not None:
            self._restart(mine.session)

    def _restart(self, session: Session) -> None:
        """Begin a conversation again under another name; its secrets are nobody's any more."""
        at = self.sessions.index(session)
        self.sessions[at] = self._session(at)

    def plain(self) -> None:
        """Somebody without an envelope sends what a session has, unless that tells a secret."""
        session = self.rng.choice(self.sessions)
        known = session.last.tokens if session.last is not None else self.opening
        if not set(known) & set(SECRETS):
            self._send((*known, *draw_ordinary(self.rng, 3)))

    def _send(self, prompt: tuple[int, ...], payload: EditPayload | None = None) -> Running:
        options = {"priority": self.rng.randrange(3)} if self.priorities else {}
        decode = self.rng.choice([1, 3, 3, 30])
        name = self.engine.start(
            prompt, payload, decode=decode, scores=20, allowed=ORDINARY, **options
        )
        self.running[name] = Running(name, prompt, payload=payload)
        return self.running[name]

    def take_turn(self, session: Session) -> None:
        """An append, an edit or a forget."""
        if session.last is None or len(session.last.tokens) > 360:
            self._restart(session)
            session = next(s for s in self.sessions if not s.begun)
            tokens = (*self.opening, *draw_ordinary(self.rng, self.rng.randint(60, 160)))
            spans: tuple[SpanLabel, ...] = (SpanLabel("opening", 0, len(tokens)),)
            directives: tuple[Directive, ...] = ()
            forget: tuple[str, ...] = ()
        else:
            tokens, spans = session.last.tokens, session.spans
            directives, forget = self._edits(session)
            tokens = apply_directives(tokens, directives)
            spans = moved(spans, directives)
        session.begun += 1
        turn = f"t{session.begun}"
        added = list(draw_ordinary(self.rng, self.rng.randint(3, 50)))
        start = len(tokens)
        label = f"new{session.begun}"
        if self.rng.random() < 0.5:
            secret = next(self.secret)
            added[self.rng.randrange(len(added))] = secret
            session.secrets[secret] = label
        prompt = (*tokens, *added)
        spans = (*spans, SpanLabel(label, start, len(prompt)))
        assert session.last is None or session.turn
        sources = (session.last.ref(session.turn),) if session.last and directives else ()
        payload = EditPayload(
            session=session.name,
            scope=session.scope,
            turn=turn,
            sources=sources,
            directives=directives,
            lineage=session.lineage,
            spans=spans,
            forget=forget,
        )
        mine = self._send(prompt, payload)
        mine.session, mine.source, mine.spans = session, session.truth, spans
        session.turn = turn
        if forget:
            gone = {each for each, name in session.secrets.items() if name in forget}
            self.open[mine.name] = gone
            session.secrets = {s: name for s, name in session.secrets.items() if s not in gone}

    def _edits(self, session: Session) -> tuple[tuple[Directive, ...], tuple[str, ...]]:
        assert session.last is not None
        names = [label for label in session.spans if label.span in session.secrets.values()]
        if names and self.rng.random() < 0.35:
            label = self.rng.choice(names)
            return (Directive(label.start, label.end),), (label.span,)
        if self.rng.random() < 0.25:
            return (), ()
        length = len(session.last.tokens)
        cuts = sorted(self.rng.sample(range(34, length), self.rng.choice([2, 4])))
        secrets = {at for at, token in enumerate(session.last.tokens) if token in SECRETS}
        found = []
        for start, limit in zip(cuts[::2], cuts[1::2], strict=True):
            end = min(limit, start + self.rng.choice([2, 30]))
            if not secrets & set(range(start, end)):
                found.append(
                    Directive(start, end, draw_ordinary(self.rng, self.rng.choice([0, 2, 9])))
                )
        return tuple(found), ()

    def collect(self, mine: Running, output: Any) -> None:
        """Compare an answer with the reference, and go on from it."""
        answer = self.engine._answer(mine.name, output)
        if mine.payload is None:
            self._compare(mine, answer, [Fresh(answer.prompt)])
            return
        session = mine.session
        assert session is not None
        assert answer.record is not None
        receipt = answer.record.receipt
        counts = receipt.tokens
        assert answer.record.finished
        assert counts.prompt == len(answer.prompt)
        assert counts.prompt == counts.prefix + counts.spliced + counts.reused + counts.prefilled
        self.spliced += receipt.outcome is Outcome.SPLICED
        self.staged += receipt.stages > 0
        self.failed += receipt.reason is Reason.TRANSFORM_FAILED
        pieces = self._pieces(mine, receipt.lineage, counts.prefix)
        truth = self._compare(mine, answer, pieces)
        if truth is None or not receipt.turn:
            self._restart(session)
            return
        session.last, session.truth, session.lineage = answer, truth, receipt.lineage
        written = SpanLabel(f"{receipt.turn}.out", len(answer.prompt), len(answer.tokens))
        session.spans = (*mine.spans, written)

    def _pieces(self, mine: Running, lineage: tuple[LineageRun, ...], prefix: int) -> list[Piece]:
        """The contract's version of a turn's plan."""
        assert mine.copies is not None
        pieces: list[Piece] = []
        private = mine.source is not None and any(run.start < prefix for run in lineage)
        if private and mine.source is not None:
            pieces.append(Keep(mine.source, 0, prefix))
        elif prefix:
            pieces.append(Fresh(mine.prompt[:prefix]))
        at = prefix
        for copy in mine.copies:
            assert mine.source is not None
            if copy.dest > at:
                pieces.append(Fresh(mine.prompt[at : copy.dest]))
            pieces.append(Keep(mine.source, copy.start, copy.end))
            at = copy.dest + copy.end - copy.start
        return [*pieces, Fresh(mine.prompt[at:])]

    def _compare(self, mine: Running, answer: Answer, pieces: list[Piece]) -> Remembered | None:
        """Check an answer, unless vLLM has computed it in two ways: it took the blocks away."""
        if mine.preempted and mine.payload is not None and len(pieces) > 1:
            return None
        expected = expect(self.subject, pieces, answer)
        error = distance(answer, expected)
        assert error <= BOUND, (mine, error)
        self.compared += 1
        return expected.turn

    def check_forgotten(self) -> None:
        """A closed receipt's secrets are in no slot, free ones included."""
        sent = self.engine.sent
        for message in list(self.open):
            record = sent.records.get(message)
            if record is None:
                if message not in self.running:
                    del self.open[message]  # aborted before it ran
                continue
            forgot = sent.forgot.get(message, record.receipt.forgot)
            assert forgot is not None
            if not forgot.pending and not self.engine.leyline.has_orders:
                self.gone |= self.open.pop(message)
                self.forgot += 1
        assert not self.rows.held(self.gone)


def moved(spans: tuple[SpanLabel, ...], edits: tuple[Directive, ...]) -> tuple[SpanLabel, ...]:
    """The labels of the edited text; one that was cut whole is empty."""

    def at(position: int) -> int:
        shift = 0
        for edit in edits:
            if position >= edit.end:
                shift += edit.delta
            elif position > edit.start:
                return edit.start + shift + min(position - edit.start, len(edit.replacement))
        return position + shift

    found: list[SpanLabel] = []
    for span in spans:
        start = found[-1].end if found else 0
        found.append(SpanLabel(span.span, start, max(start, at(span.end))))
    return tuple(found)
