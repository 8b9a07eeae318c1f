"""Forgets that turns demand: when they are carried out, and which running requests they reach."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from leyline_engine.admit.rules import CheckedRequest
from leyline_engine.contract import Reason
from leyline_engine.records.ledger import SpanLedger
from leyline_engine.records.lineage import first_spliced, runs_before
from leyline_engine.records.publications import Publication
from leyline_engine.scheduler.containment import contained
from leyline_engine.vllm.accounts import Accounts
from leyline_engine.vllm.admission import Admission
from leyline_engine.vllm.forgetting import Forgetter, Forgotten
from leyline_engine.vllm.turn import Phase, Turn
from leyline_engine.vllm.withholding import Withholder

log = logging.getLogger(__name__)


class TurnForgets:
    """Forgets of one scheduler's turns.

    Args:
        ledger: knows which lineages have read a span.
        forgetter: carries forgets out on the blocks.
        withholder: keeps KV that running requests compute from being found.
        admission: gives up splices of what is forgotten.
        accounts: reports the progress of forgets.
        turns: turns that wait or run, by request.
    """

    def __init__(
        self,
        ledger: SpanLedger,
        forgetter: Forgetter,
        withholder: Withholder,
        admission: Admission,
        accounts: Accounts,
        *,
        turns: Mapping[str, Turn],
    ) -> None:
        self._ledger = ledger
        self._forgetter = forgetter
        self._withholder = withholder
        self._admission = admission
        self._accounts = accounts
        self._turns = turns
        self.strangers: Iterable[Any] = ()
        """All of vLLM's requests, with those that have no turn."""

    def carry_out(self, turn: Turn) -> None:
        """Forget what a turn demands: vLLM has given it blocks, and its first copies are ordered.

        Blocks that its other copies are made from are held until then.
        """
        checked = turn.checked
        if checked is None or not checked.forgets or turn.session is None:
            return
        try:
            self._remove_readers(turn, checked)
        except Exception:
            log.exception("a forget failed; nobody finds what may have read the spans")
            self._condemn(turn)

    def _remove_readers(self, turn: Turn, checked: CheckedRequest) -> None:
        assert turn.session is not None  # noqa: S101 - the caller's contract
        prefix = turn.prompt[: turn.prefix]
        found = Publication(
            turn.path(prefix).keys, runs_before(turn.lineage, turn.prefix), turn.space
        )
        spared = (Publication(turn.prompt, (), turn.space), found)
        for other in self._others(turn):
            answers = other.message_id == turn.message_id and other.prompt == turn.prompt
            if other.session == turn.session and not answers:
                self._withhold_own(other, turn.message_id, spared)
        done = self._forgetter.forget(
            turn.session, checked.forgotten, spared=spared, ticket=turn.message_id
        )
        for other in self._others(turn):
            if other.phase not in {Phase.NEW, Phase.PLANNED} and self._has_read(done, other):
                self._withhold(other, turn.message_id)
        self._withhold_strangers(done, turn.message_id)
        self._forgetter.progress()
        turn.forgot = self._forgetter.counts(turn.message_id)

    def _others(self, turn: Turn) -> list[Turn]:
        return [each for each in self._turns.values() if each is not turn]

    def _has_read(self, done: Forgotten, other: Turn) -> bool:
        length = len(other.prompt)
        return self._ledger.read_by(done.struck, other.scope, other.lineage, other.carried, length)

    def _withhold_own(self, turn: Turn, ticket: str, spared: Sequence[Publication]) -> None:
        """Withhold a turn of the session that forgets, except for leading tokens that stay.

        Args:
            spared: paths that the session's new prompt may continue.
        """
        kept = 0
        if turn.runs and turn.session is not None:
            path = turn.path(turn.prompt)
            exact = path.cut(first_spliced(path.runs, len(path.keys)))
            turn.kept = self._forgetter.agreed(exact, spared)
            for other in self._turns.values():
                if not other.runs or other.withheld or other.session in (None, turn.session):
                    continue
                theirs = other.path(other.prompt[: other.req.num_computed_tokens])
                length = self._forgetter.agreed(exact, (theirs,))
                if length > turn.kept and other.session is not None:
                    # From now on these blocks are its session's, also if it forgets before it ends.
                    self._forgetter.leave(other.session, exact.cut(length))
            kept = self._forgetter.kept(turn.session, exact, spared)
        self._withhold(turn, ticket, kept)

    def _withhold(self, turn: Turn, ticket: str, kept: int = 0) -> None:
        """Publish nothing that a turn computes, as it may have read forgotten spans.

        Args:
            kept: leading tokens whose KV stays.
        """
        if turn.phase is Phase.PLANNED:
            self._admission.withdraw(turn)
        if turn.receipt is not None:
            turn.receipt = msgspec.structs.replace(turn.receipt, turn="")
        if turn.staging is not None and turn.staging.runs:
            # A run that has begun is copied: vLLM counts on its rows. Sources of a last run that is
            # ordered are held until the orders are taken.
            del turn.staging.runs[1 if turn.staging.begun else 0 :]
            if not turn.staging.runs:
                self._admission.release(turn)
                turn.move(Phase.RUNNING)
        start = min(turn.prefix, first_spliced(turn.lineage, turn.prefix))
        self._withholder.turn(turn, 0 if turn.phase is Phase.NEW else max(start, kept), ticket)

    def _withhold_strangers(self, done: Forgotten, ticket: str) -> None:
        """Withhold KV of requests without a session that continue what was removed."""
        for request in self.strangers:
            if request.request_id in self._turns or not self._withholder.holds(request):
                continue
            for first, key in done.removed:
                if len(request.block_hashes) > first and request.block_hashes[first] == key:
                    self._withholder.stranger(request, first, ticket)
                    break

    def _condemn(self, turn: Turn) -> None:
        """Remove KV after a forget failed midway: nothing that may have read the spans is found."""
        detail = "what was to be forgotten is yet to be removed"
        with contained("giving a splice up"):
            self._admission.give_up(turn, Reason.TRANSFORM_FAILED, detail)
        readers = self._ledger.borrowers(turn.scope)
        for other in self._others(turn):
            if other.scope in readers:
                with contained("withholding a turn"):
                    self._withhold(other, turn.message_id)
        if turn.session is not None:
            with contained("condemning what a session published"):
                turn.forgot = self._forgetter.condemn(turn.session, turn.message_id)

    def report(self) -> None:
        """Report the progress of forgets since the last step."""
        for ticket, counts in self._forgetter.progress().items():
            self._accounts.progressed(ticket, counts)
