"""Sessions of edits on a real server whose model keeps state per sequence, beside the contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import torch
from engine_client import EngineClient, new_message_id, request_body, source_of
from state_contract import Kept, Piece, StateModel, StateTurn

from leyline_engine.contract import (
    CopySegment,
    Directive,
    EditPayload,
    Receipt,
    RecurrentEdits,
    SpanLabel,
    apply_directives,
    edit_envelope,
    lower_directives,
)

BOUND = 1e-4
"""Largest |Δ log-probability| allowed, as a share of the largest one."""
DECODED = 6
ADDED = 12
"""Tokens of a turn's new message."""


@dataclass(frozen=True, eq=False)
class Played:
    """A turn as the server ran it, and as the contract has it."""

    name: str
    tokens: tuple[int, ...]
    prompt: int
    receipt: Receipt
    pieces: tuple[Piece, ...]
    """Of the prompt; its last token is the last of a piece of computed ones."""
    scores: torch.Tensor
    contract: StateTurn
    """All tokens that were fed."""

    def error(self, tampering: str = "") -> float:
        """Largest |Δ log-probability| of the answer, as a share of the largest.

        Args:
            tampering: a wrong splice that the server is compared with instead.
        """
        *before, last = self.pieces
        assert not isinstance(last, Kept)
        turn = StateTurn(self.contract.model, tuple(before), tampering)
        expected = turn.scores(last, self.tokens[self.prompt :])
        return float((self.scores - expected).abs().max() / expected.abs().max())


@dataclass(eq=False)
class StateSession:
    """One session against a server.

    Args:
        seed: of its random tokens, and its name.
        consent: what it asks for about recurrent states.
    """

    client: EngineClient
    model: StateModel
    seed: int
    consent: RecurrentEdits = RecurrentEdits.KEPT
    turns: list[Played] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)

    def draw(self, count: int) -> tuple[int, ...]:
        """Random tokens."""
        vocabulary = range(4, int(self.model.model.config.vocab_size))
        return tuple(self.random.choices(vocabulary, k=count))

    def open(self, length: int) -> Played:
        """A turn without history."""
        return self._run(self.draw(length), None, ())

    def edit(
        self, directives: Sequence[Directive], added: int = ADDED, source: Played | None = None
    ) -> Played:
        """An earlier turn, the last by default, edited, and new tokens after it."""
        source = source or self.turns[-1]
        prompt = (*apply_directives(source.tokens, directives), *self.draw(added))
        return self._run(prompt, source, tuple(directives))

    def _run(
        self, prompt: tuple[int, ...], source: Played | None, directives: tuple[Directive, ...]
    ) -> Played:
        name, message = f"t{len(self.turns)}", new_message_id()
        payload = EditPayload(
            session=f"s{self.seed}",
            scope="tenant",
            turn=name,
            sources=(source_of(source.name, source.tokens),) if directives and source else (),
            directives=directives,
            lineage=source.receipt.lineage if source is not None else (),
            spans=(
                SpanLabel("before", 0, len(prompt) - ADDED),
                SpanLabel(name, len(prompt) - ADDED, len(prompt)),
            ),
            recurrent=self.consent,
        )
        answer = self.client.post(
            request_body(
                prompt,
                edit_envelope(message, payload),
                decode=DECODED,
                return_logprob=True,
                logprob_start_len=-1,
            )
        )
        pairs = answer["meta_info"]["output_token_logprobs"]
        output = tuple(token for _, token, _ in pairs)
        receipt = self.client.record(message).receipt
        pieces = self._pieces(prompt, source, directives, receipt)
        fed = StateTurn(self.model, (*pieces, output[:-1]))
        scores = torch.tensor([score for score, _, _ in pairs])
        played = Played(name, prompt + output, len(prompt), receipt, pieces, scores, fed)
        self.turns.append(played)
        return played

    def _pieces(
        self,
        prompt: tuple[int, ...],
        source: Played | None,
        directives: Sequence[Directive],
        receipt: Receipt,
    ) -> tuple[Piece, ...]:
        """The parts of which the receipt makes the prompt."""
        if source is None:
            assert receipt.tokens.prefix == 0
            return (prompt,)
        kept = [CopySegment(0, 0, receipt.tokens.prefix, 0)]
        for segment in lower_directives(directives, len(source.tokens), len(prompt)):
            if not isinstance(segment, CopySegment):
                continue
            for begin, end in receipt.extents:
                first, last = max(begin, segment.dest), min(end, segment.dest_end)
                if first < last:
                    shift = segment.start - segment.dest
                    kept.append(CopySegment(0, first + shift, last + shift, first))
        pieces, at = list[Piece](), 0
        for copy in kept:
            if copy.dest > at:
                pieces.append(prompt[at : copy.dest])
            if copy.length:
                pieces.append(Kept(source.contract, copy.start, copy.end))
            at = copy.dest_end
        assert sum(copy.length for copy in kept) == receipt.tokens.served
        return (*pieces, prompt[at:])
