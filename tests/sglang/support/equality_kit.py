"""A real server's splices beside the amortize contract computed the long way round.

A session is played turn by turn on both sides. The server chooses the tokens; the reference, plain
transformers in fp32, is led along them. Compared are log-probabilities after the last spliced
position and of every decoded token, and the pool's rows of the whole turn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any

import httpx
import msgspec
import torch
from oracle_models import OracleModel
from oracle_pages import in_whole_pages
from oracle_reference import SINK, Fresh, Keep, LongWay, Piece, Remembered, long_way_round, placed
from pool_probe import ROTARY, ROWS, WATCH, Rows, read_rows
from sglang_server import SglangServer
from transformers import AutoModelForCausalLM

from leyline_engine.contract import (
    Directive,
    EditPayload,
    LiteralSegment,
    Receipt,
    Segment,
    SourceRef,
    TurnRecord,
    apply_directives,
    edit_envelope,
    lower_directives,
    token_digest,
)

BOUND = 1e-4
"""Largest |Δ log-probability| allowed, as a share of the largest |logit|."""
CONTROL_FACTOR = 100
"""A wrong splice must be off by so many times the bound."""
DECODED = 32
MIN_COPY = 32
"""Shorter copies are prefilled by a server with its default settings; a literal on purpose."""
TOKENS = range(64, 4096)
"""Ordinary tokens of the test models."""
_ASKED = sorted(random.Random(0).sample(TOKENS, 256))
"""Log-probabilities of so many tokens are compared at every position."""


def load_reference(folder: Path) -> OracleModel:
    """The model in ``folder`` as plain transformers runs it, fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return OracleModel(folder.name, model.requires_grad_(requires_grad=False))


def draw_tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    """Random ordinary tokens."""
    return tuple(rng.choices(TOKENS, k=count))


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """One turn as both sides have it."""

    name: str
    tokens: tuple[int, ...]
    """Prompt and generated tokens, of which the last was never fed."""
    prompt: int
    """Tokens of the prompt."""
    receipt: Receipt
    truth: Remembered
    """The turn as the reference remembers it."""
    rows_file: Path
    pieces: tuple[Piece, ...]
    """The parts of which the contract makes the prompt."""
    scored_from: int
    """Position of the first token whose log-probabilities were asked for."""
    scores: torch.Tensor
    """fp32 ``[n, len(_ASKED)]``: the server's, of the tokens at ``scored_from`` and after."""
    expected: LongWay

    @property
    def error(self) -> float:
        """Largest |Δ log-probability|, as a share of the largest |logit| at its position."""
        return distance(self.scores, self.expected)

    @property
    def ref(self) -> SourceRef:
        """A payload's reference to this turn."""
        return SourceRef(self.name, len(self.tokens), token_digest(self.tokens))

    def rows(self) -> Rows:
        """Rows of the pool for all tokens but the last."""
        return read_rows(self.rows_file)


@dataclass(eq=False)
class PlayedSession:
    """One session against a server, and its reference.

    Args:
        server: loads the probe.
        subject: the server's model, as :func:`load_reference` gives it.
        folder: takes files of the pool's rows.
        session: a name that no other session on the server has.
        scope: tenant scope.
        lock: shared by sessions that are played at the same time on one reference.
        page: tokens per page of the server.
        adapter: name of the LoRA adapter under which it is served; the subject has its weights.
        scored: False to ask for no log-probabilities: turns have no :attr:`Played.error` then.
        ahead: tokens after its own by which the server finds a slot.
    """

    server: SglangServer
    subject: OracleModel
    folder: Path
    session: str = "s"
    scope: str = "tenant"
    turns: list[Played] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)
    page: int = 1
    adapter: str | None = None
    scored: bool = True
    ahead: int = 0

    def open(self, prompt: Sequence[int], **options: Any) -> Played:
        """A turn without edits."""
        return self._run(prompt, [Fresh(tuple(prompt))], len(prompt) - 1, **options)

    def edit(
        self, source: Played, directives: Sequence[Directive], tail: Sequence[int], **options: Any
    ) -> Played:
        """An earlier turn, edited by directives, and a tail."""
        prompt = (*apply_directives(source.tokens, directives), *tail)
        segments = lower_directives(directives, len(source.tokens), len(prompt))
        return self._splice(prompt, [source], segments, {"directives": tuple(directives)} | options)

    def compose(
        self, sources: Sequence[Played], segments: Sequence[Segment], prompt: Sequence[int]
    ) -> Played:
        """A prompt of pieces of earlier turns; the first segment copies the first one's start."""
        return self._splice(prompt, sources, segments, {"segments": tuple(segments)})

    def _splice(
        self,
        prompt: Sequence[int],
        sources: Sequence[Played],
        segments: Sequence[Segment],
        options: dict[str, Any],
    ) -> Played:
        truths = [turn.truth for turn in sources]
        if self.page == 1 and not self.ahead:
            pieces, spliced_end = contracted(prompt, truths, segments)
        else:
            pieces, spliced_end = contracted_pages(prompt, truths, segments, self.page, self.ahead)
        prefix = segments[0].dest_end
        options["lineage"] = tuple(r for r in sources[0].receipt.lineage if r.start < prefix)
        options["sources"] = tuple(turn.ref for turn in sources)
        return self._run(prompt, pieces, spliced_end, **options)

    def _run(
        self,
        prompt: Sequence[int],
        pieces: Sequence[Piece],
        scored_from: int,
        *,
        watch: Played | None = None,
        turns_keys: str | None = None,
        **members: Any,
    ) -> Played:
        name = f"t{len(self.turns)}"
        rows_file = self.folder / f"{self.session}-{name}.rows"
        payload = EditPayload(session=self.session, scope=self.scope, turn=name, **members)
        probe = {ROWS: str(rows_file)}
        if watch is not None:
            probe[WATCH] = str(watch.rows_file)
        if turns_keys is not None:
            probe[ROTARY] = turns_keys
        message = f"{self.session}.{name}"
        body: dict[str, Any] = {} if self.scored else {"return_logprob": False}
        if self.adapter is not None:
            body["lora_path"] = self.adapter
        answer = ask(
            self.server, prompt, scored_from, payload, message=message, probe=probe, **body
        )
        output = answer["output_ids"]
        record = fetch_record(self.server, message)
        with self.lock:
            expected = expect(self.subject, pieces, scored_from + 1, output)
        played = Played(
            name,
            (*prompt, *output),
            len(prompt),
            record.receipt,
            expected.turn,
            rows_file,
            tuple(pieces),
            scored_from,
            scores_of(answer) if self.scored else torch.empty(0),
            expected,
        )
        assert expected.turn.tokens == played.tokens
        self.turns.append(played)
        return played


def ask(
    server: SglangServer,
    prompt: Sequence[int],
    scored_from: int,
    payload: EditPayload | None = None,
    *,
    message: str = "",
    probe: dict[str, str] | None = None,
    **body: Any,
) -> dict[str, Any]:
    """Generate ``DECODED`` tokens, with log-probabilities after ``scored_from`` and of them."""
    custom: dict[str, Any] = dict(probe or {})
    if payload is not None:
        custom["kv_hints"] = msgspec.to_builtins(edit_envelope(message, payload))
    sampling = {"temperature": 0, "max_new_tokens": DECODED, "ignore_eos": True}
    return server.generate(
        list(prompt),
        DECODED,
        sampling_params=sampling | ({"custom_params": custom} if custom else {}),
        **{
            "return_logprob": True,
            "logprob_start_len": scored_from,
            "token_ids_logprob": _ASKED,
        }
        | body,
    )


def scores_of(answer: dict[str, Any]) -> torch.Tensor:
    """fp32 ``[n, len(_ASKED)]`` log-probabilities that a server gave: of the next token after
    ``scored_from``, and of each one after it."""
    meta = answer["meta_info"]
    read, written = meta["input_token_ids_logprobs"], meta["output_token_ids_logprobs"]
    # The first position has no logits of its own: they belong to a token that was reused.
    rows = [row for row in (*read, *written) if row is not None]
    return torch.tensor([[score for score, *_ in sorted(row, key=lambda s: s[1])] for row in rows])


def fetch_record(server: SglangServer, message: str) -> TurnRecord:
    """The receipt of a finished request, and what goes with it."""
    answer = httpx.get(f"{server.base_url}/leyline/receipts/{message}", timeout=30)
    answer.raise_for_status()
    return msgspec.json.decode(answer.content, type=TurnRecord)


def contracted(
    prompt: Sequence[int], sources: Sequence[Remembered], segments: Sequence[Segment]
) -> tuple[list[Piece], int]:
    """The contract's version of segments, and the end of the last spliced token.

    The first segment is the prompt's cached prefix. Of the others, what would land below the sink
    is computed again, and so are copies that are then too short to be worth a launch.
    """
    pieces: list[Piece] = []
    spliced_end = 0
    for segment in segments:
        tokens = tuple(prompt[segment.dest : segment.dest_end])
        if isinstance(segment, LiteralSegment):
            pieces.append(Fresh(tokens))
            continue
        turn = sources[segment.source]
        last = min(segment.end, turn.computed)
        last = min(last, segment.start + len(prompt) - 1 - segment.dest)
        skip = max(0, SINK - segment.dest) if segment.dest else 0
        if segment.dest and last - segment.start - skip < MIN_COPY:
            pieces.append(Fresh(tokens))
            continue
        cut = segment.start + skip
        pieces += [
            Fresh(tokens[:skip]),
            Keep(turn, cut, last),
            Fresh(tokens[last - segment.start :]),
        ]
        spliced_end = segment.dest + last - segment.start
    return [piece for piece in pieces if piece_length(piece)], spliced_end


def contracted_pages(
    prompt: Sequence[int],
    sources: Sequence[Remembered],
    segments: Sequence[Segment],
    page: int,
    ahead: int,
) -> tuple[list[Piece], int]:
    """The same where a tree holds whole pages only, or finds a slot by more tokens than its own."""
    pieces: list[Piece] = []
    for segment in segments:
        tokens = tuple(prompt[segment.dest : segment.dest_end])
        if isinstance(segment, LiteralSegment):
            pieces.append(Fresh(tokens))
            continue
        turn = sources[segment.source]
        last = min(segment.end, turn.computed)
        pieces += [Keep(turn, segment.start, last), Fresh(tokens[last - segment.start :])]
    paged = in_whole_pages(pieces, segments[0].dest_end, page, min_copy=MIN_COPY, ahead=ahead)
    ends = accumulate(piece_length(piece) for piece in paged)
    kept = [end for piece, end in zip(paged, ends, strict=True) if isinstance(piece, Keep)]
    # SGLang looks for nothing that needs a token after the first whose scores are asked for.
    return paged, max(kept, default=0) + ahead


def spliced_by_contract(pieces: Sequence[Piece]) -> int:
    """Kept tokens after the prefix."""
    begins = pieces and isinstance(pieces[0], Keep)
    kept = [piece_length(piece) for piece in pieces if isinstance(piece, Keep)]
    return sum(kept[1:] if begins else kept)


def moves_keys(pieces: Sequence[Piece]) -> bool:
    """Return True if any kept token has another position than before."""
    at = 0
    for piece in pieces:
        if isinstance(piece, Keep) and piece.start != at:
            return True
        at += piece_length(piece)
    return False


def piece_length(piece: Piece) -> int:
    """Tokens of a piece."""
    return piece.end - piece.start if isinstance(piece, Keep) else len(piece.tokens)


def expect(
    subject: OracleModel, pieces: Sequence[Piece], start: int, output: Sequence[int]
) -> LongWay:
    """The reference's logits of positions ``start - 1`` and on, along a prompt and its output.

    Args:
        pieces: of the whole prompt; all after ``start`` is computed.
        start: at least 1; tokens from there on are fed one by one.
        output: generated tokens.
    """
    at = 0
    head: list[Piece] = []
    rest: list[int] = []
    for piece in pieces:
        cut = min(max(start - at, 0), piece_length(piece))
        at += piece_length(piece)
        if isinstance(piece, Keep):
            assert cut == piece_length(piece), "what is fed one by one must be computed"
            head.append(piece)
        else:
            head.append(Fresh(piece.tokens[:cut]))
            rest += piece.tokens[cut:]
    head = [piece for piece in head if piece_length(piece)]
    return long_way_round(subject, head, (*rest, *output[:-1]), output[-1])


def distance(scores: torch.Tensor, expected: LongWay) -> float:
    """Largest |Δ log-probability|, as a share of the reference's largest |logit| there."""
    logits = torch.stack(expected.logits).double()
    assert len(scores) == len(logits)
    right = logits.log_softmax(dim=-1)[:, _ASKED]
    error = (scores.double() - right).abs().amax(dim=-1)
    return float((error / logits.abs().amax(dim=-1)).max())


@dataclass(frozen=True, slots=True)
class RowErrors:
    """The distance of a turn's pool rows from the reference's, as shares of the largest element of
    their layer."""

    still: float
    """Latents, or values."""
    turning: float
    """Rotary keys."""


def row_errors(subject: OracleModel, played: Played) -> RowErrors:
    """Compare the pool's rows of a turn with what the reference has in its cache."""
    rows = played.rows()
    keys, others = placed(subject, played.truth)
    assert len(rows.slots) == len(played.tokens) - 1 == len(keys[0])
    turning = rows.turning
    if getattr(subject.config, "rope_interleave", False):
        # transformers parts the pairs before it turns them, and keeps them like that.
        turning = tuple(torch.cat((band[..., ::2], band[..., 1::2]), -1) for band in turning)
    return RowErrors(_largest_share(rows.still, others), _largest_share(turning, keys))


def _largest_share(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    return max(
        float((a.reshape(b.shape) - b).abs().max() / b.abs().max())
        for a, b in zip(got, expected, strict=True)
    )
