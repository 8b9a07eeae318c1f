"""The KV within reach of a prompt: what a retained turn has of it, and the edits between. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from leyline_engine.contract import uncovered

from ..model.diff import diff_messages
from ..model.messages import text_of
from ..model.prepared import Prepared
from ..model.session import EditMode, RetainedTurn
from ..model.undeclared import COMPACTION
from ..model.vocabulary import CAUSES
from .candidates import Candidate, Edit

Moved = Literal["", "failover", "engine", "model", "session"]

_MESSAGE_WEIGHT = 16
"""Characters counted for a message's role and marks."""


class Stretch(NamedTuple):
    """Prompt tokens ``[start, end)`` of the retained turn, with the causes of edits before them."""

    start: int
    end: int
    first: str
    """Cause of the first edit before; empty if there is none."""
    hard: str
    """Cause of the first edit before that can't be spliced over; empty if there is none."""
    thinking: bool = False
    """True if the template stripped thinking before."""
    kept_out: bool = False
    """True if nothing but such exact edits is in the way."""


class Cut(NamedTuple):
    """An edit that cuts a prompt off from the KV of a retained turn."""

    position: int
    """Place of the edit in the prompt, in tokens."""
    cause: str
    """As in the edit's record, with names."""
    mode: EditMode
    role: str
    message: int | None
    """Index in the caller's list; None if the message is gone or the edit concerns none."""
    withheld: bool = False
    """True if a certain session name would let it be amortized."""


@dataclass(frozen=True, slots=True)
class Reach:
    """The parts of a prompt that one retained turn has."""

    stretches: tuple[Stretch, ...] = ()
    """Stretches by position. If :attr:`estimated` is set, only their lengths count, and only tokens
    after the first edit, if any."""
    known: bool = False
    """True if there was a retained turn to compare with."""
    estimated: bool = False
    """True if derived from messages: the tokens aren't known here."""
    moved: Moved = ""
    """The reason that the serving engine can't have the KV for this turn: it is on another engine,
    this one was restarted, or the KV is another model's or another session's."""
    context: str = ""
    """:attr:`~leyline_proxy.model.rendered.Rendered.context` of a turn without tokens."""
    cuts: tuple[Cut, ...] = ()
    """Edits since the retained turn, by position; empty if :attr:`estimated` is set."""
    turn: str = ""
    """Name of the retained turn."""


def reach_of(candidate: Candidate, moved: Moved = "", quotes: Sequence[Candidate] = ()) -> Reach:
    """Return the parts of a prompt that a retained turn has, from the comparison of both.

    Args:
        quotes: answers that the prompt quotes. Those for a policy are within reach, too, and in a
            compaction all are.
    """
    turn = candidate.turn
    kept = list(_held(candidate))
    compacted = any(each.cause == COMPACTION for edit in candidate.edits for each in edit.causes)
    near = [quote for quote in quotes if compacted or quote.turn.for_policy]
    quoted = sorted(run for quote in near for run in _held(quote))
    kept = sorted([*kept, *(part for run in quoted for part in uncovered(run, kept))])
    stretches: list[Stretch] = []
    edits = sorted(candidate.edits, key=lambda edit: edit.hunk.new_start)
    ahead = deque(edits)
    first = hard = other = ""
    thinking = False
    for start, end in kept:
        left = start
        while left < end:
            while ahead and ahead[0].hunk.new_start <= left:
                edit = ahead.popleft()
                first = first or _cause(edit)
                cause = _cause(edit) if edit.mode != "amortize" else ""
                hard = hard or cause
                strips = all(each.thinking for each in edit.causes)
                thinking = thinking or strips
                other = other or ("" if strips else cause)
            right = min(end, ahead[0].hunk.new_start) if ahead else end
            kept_out = bool(hard) and not other
            stretches.append(Stretch(left, right, first, hard, thinking, kept_out))
            left = right
    cuts = tuple(map(_cut, edits))
    return Reach(tuple(stretches), known=True, moved=moved, cuts=cuts, turn=turn.turn)


def _held(candidate: Candidate) -> Iterator[tuple[int, int]]:
    """Yield the parts of a prompt that a retained turn has KV of."""
    # The last generated token has never been read and has no KV.
    limit = len(candidate.turn.tokens) - bool(candidate.turn.output_ids)
    for run in candidate.diff.kept:
        if run.start < limit:
            yield run.dest, run.dest + min(run.end, limit) - run.start


def reach_by_messages(
    last: RetainedTurn, prepared: Prepared, first: str, context: str, moved: Moved = ""
) -> Reach:
    """Estimate the part of a prompt that a retained turn has if tokens aren't known: the engine's
    count of its prompt, divided by the length of messages.

    Args:
        first: cause of the first edit since; empty if there is none.
        context: of this prompt.
    """
    held = last.receipt.tokens.prompt if last.receipt is not None else 0
    behind = _kept_behind(last.prepared, prepared)
    length = held
    if last.rendered.context != context:
        first = "tools"
    elif first or behind:
        first, length = first or "undeclared", int(held * behind)
    cause = cause_label(first)
    stretches = (Stretch(0, length, cause, cause),) if length > 0 else ()
    return Reach(stretches, held > 0, estimated=True, moved=moved, context=context, turn=last.turn)


def unedited(reach: Reach) -> int:
    """Return the tokens from the prompt's beginning that a retained turn has, up to an edit."""
    held = 0
    for stretch in reach.stretches:
        if stretch.first or stretch.start != held:
            break
        held = stretch.end
    return held


def cause_label(cause: str) -> str:
    """Return the cause of an edit without names."""
    kind = cause.partition(":")[0]
    return kind if kind in CAUSES or not kind else "policy"


def _cause(edit: Edit) -> str:
    return cause_label(_cut(edit).cause)


def _cut(edit: Edit) -> Cut:
    """Return the edit under the cause that gives it its mode."""
    place, mode = edit.hunk.new_start, edit.mode
    for each in edit.causes:
        if each.mode == mode:
            return Cut(place, each.cause, mode, each.role, each.message, each.withheld)
    return Cut(place, "template", mode, "template", None)


def _kept_behind(last: Prepared, now: Prepared) -> float:
    """Return the share of the last prompt that is kept after the first edit."""
    before, after = last.sent_fingerprints, now.sent_fingerprints
    if after[: len(before)] == before:
        return 0.0
    steps = diff_messages(
        last.messages,
        now.messages,
        old_fingerprints=before,
        new_fingerprints=after,
    ).steps
    behind = whole = 0
    edited = False
    for step in steps:
        if step.old is None:
            edited = True
            continue
        weight = len(text_of(last.messages[step.old])) + _MESSAGE_WEIGHT
        whole += weight
        edited = edited or step.kind != "kept"
        behind += weight if edited and step.kind == "kept" else 0
    return behind / whole if whole else 0.0
