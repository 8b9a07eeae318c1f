"""Possible contributions of retained turns to a prompt: kept tokens, and causes of the changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from leyline_engine.contract import Recompute, find_quotes, uncovered

from ..model.diff import MessageDiff, diff_messages
from ..model.history import FRAME, shortest_partial
from ..model.messages import text_of
from ..model.prepared import DECLARED, Prepared
from ..model.rendered import Rendered
from ..model.session import EditMode, EditRecord, RetainedTurn
from ..model.spans import SpanNames
from ..model.undeclared import UndeclaredRules
from .causes import Cause, CauseFinder, strictest
from .forgetting import Demand, new_demands
from .quotes import Quotes, compacted_messages
from .stripped import Decode, strips_thinking
from .token_diff import Hunk, Kept, SourceView, TokenDiff, continued, diff_tokens

_REASONING = ("reasoning_content", "reasoning", "thinking")


def left_out(hunk: Hunk, turn: RetainedTurn, prepared: Prepared, decode: Decode) -> int | None:
    """Return the caller's message of a turn's answer if the caller left out a text of it.

    Some clients keep only an answer's calls, and drop the text in front of them. The template can't
    have dropped a text that it wasn't given.

    Args:
        hunk: a difference that no message explains and that strips no thinking.
        prepared: this turn's messages.

    Returns:
        The message's index in the caller's list of this turn, or None if the caller has the text.
    """
    before, place = turn.prepared.client_fingerprints, len(turn.prepared.client)
    removes = hunk.end > hunk.start >= len(turn.rendered.tokens) and hunk.new_end == hunk.new_start
    goes_on = prepared.client_fingerprints[:place] == before and len(prepared.client) > place
    if not removes or not goes_on:
        return None
    message = prepared.client[place]
    text = decode(turn.tokens[hunk.start : hunk.end]).strip()
    if message.get("role") != "assistant" or not text:
        return None
    told = (text_of(message), *(str(message.get(name) or "") for name in _REASONING))
    return None if any(text in each for each in told) else place


@dataclass(frozen=True, slots=True)
class Edit:
    """A hunk with its explanation."""

    hunk: Hunk
    causes: tuple[Cause, ...]
    mode: EditMode
    behind: bool
    """True if any kept token comes after it."""


@dataclass(frozen=True)  # no slots: reusable tokens are counted once
class Candidate:
    """One retained turn as a source."""

    turn: RetainedTurn
    diff: TokenDiff
    edits: tuple[Edit, ...]
    copies: tuple[Kept, ...]
    """Kept runs that may be used, including the common prefix, by destination."""
    forgets: bool = field(init=False)
    reusable: int = field(init=False)
    """Tokens in :attr:`copies`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "forgets", any(edit.mode == "forget" for edit in self.edits))
        object.__setattr__(self, "reusable", sum(run.length for run in self.copies))


def consider(
    turn: RetainedTurn,
    prepared: Prepared,
    rendered: Rendered,
    rules: UndeclaredRules,
    names: SpanNames,
    *,
    recompute: Recompute,
    decode: Decode | None = None,
    quotes: Quotes = Quotes(),  # noqa: B008 - immutable
    later: Sequence[RetainedTurn] = (),
) -> Candidate:
    """Compare one retained turn with this one.

    Args:
        names: of this turn's messages.
        decode: for finding thinking that the template strips, and texts of an answer that the
            caller left out; None finds none.
        recompute: tokens after each edit to compute again.
        quotes: answers that the prompt quotes.
        later: the session's turns since; one of them may show the turn's answer as a message.
    """
    before = turn.prepared
    view = SourceView(turn.tokens, turn.rendered.spans, len(turn.rendered.tokens))
    demands = new_demands(turn, prepared, names)
    if rules.trust == "opening":
        # Only who got the summary can quote it.
        alike = bool(quotes) or _opens_alike(before, prepared)
        rules = replace(rules, trust="name" if alike else "messages")
    shown = rules.trust == "name" or not turn.lineage or _is_shown(before, prepared)
    same = continued(view, rendered) if shown and not demands else None
    if same is not None:  # nothing changed, so there is nothing to explain
        return Candidate(turn, same, (), _usable(same, (), (), turn, recompute))
    sent, client = _alignments(before, prepared)
    diff = diff_tokens(view, rendered, sent)
    finder = CauseFinder(
        before,
        prepared,
        sent,
        client,
        rules,
        demanded={demand.client_index for demand in demands},
        same_context=turn.rendered.context == rendered.context,
        strips_thinking=lambda hunk: (
            decode is not None and strips_thinking(hunk, turn.tokens, rendered.tokens, decode)
        ),
        left_out=lambda hunk: (
            left_out(hunk, turn, prepared, decode) if decode is not None else None
        ),
        compacted=compacted_messages(turn, sent, client, quotes),
        edited_answer=view.prompt_length if _answer_is_edited(before, prepared, later) else None,
    )
    edits = _with_demands(_edits(diff, finder, quotes.end), demands, diff, prepared)
    if not shown:
        edits = _with_hidden(edits, turn, diff, client, prepared)
    return Candidate(turn, diff, tuple(edits), _usable(diff, edits, demands, turn, recompute))


def _alignments(before: Prepared, prepared: Prepared) -> tuple[MessageDiff, MessageDiff]:
    """Return the alignments of the sent messages, and of the caller's own lists."""
    sent = diff_messages(
        before.messages,
        prepared.messages,
        old_fingerprints=before.sent_fingerprints,
        new_fingerprints=prepared.sent_fingerprints,
    )
    if before.sent_as_given and prepared.sent_as_given:
        return sent, sent
    client = diff_messages(
        before.client,
        prepared.client,
        old_fingerprints=before.client_fingerprints,
        new_fingerprints=prepared.client_fingerprints,
    )
    return sent, client


def quoting(turns: Sequence[RetainedTurn], quotes: Quotes) -> tuple[Candidate, ...]:
    """Return the turns whose answers a prompt quotes, as sources of those alone."""
    return tuple(
        Candidate(turn, TokenDiff(runs, (), runs[-1].dest_end), (), runs)
        for turn, runs in zip(turns, quotes.of_turn, strict=False)
        if runs
    )


def _answer_is_edited(before: Prepared, prepared: Prepared, later: Sequence[RetainedTurn]) -> bool:
    """Return True if the caller sent a turn's answer as a message, and no longer sends it so."""
    place, known = len(before.client), before.client_fingerprints
    for turn in later:
        shown = turn.prepared.client_fingerprints
        if len(shown) > place and shown[:place] == known:
            return shown[place] not in prepared.client_fingerprints
    return False


def _opens_alike(before: Prepared, prepared: Prepared) -> bool:
    """Return True if a list has the task of an earlier one, and the first answer to it."""
    roles = [str(message.get("role")) for message in before.client]
    opening = zip(before.client_fingerprints[: shortest_partial(roles)], roles, strict=False)
    return all(
        value in prepared.client_fingerprints for value, role in opening if role not in FRAME
    )


def _is_shown(before: Prepared, prepared: Prepared) -> bool:
    """Return True if the caller's list still has all messages of an earlier one.

    If no turn amortized the caller's own edits, spliced KV has read text that is missing from its
    prompt, but not from the caller's list. So it remembers nothing that this list doesn't show.
    """
    return set(before.client_fingerprints).issubset(prepared.client_fingerprints)


def _with_hidden(
    edits: Sequence[Edit],
    turn: RetainedTurn,
    diff: TokenDiff,
    client: MessageDiff,
    prepared: Prepared,
) -> list[Edit]:
    """Return the edits plus an exact one at the start of a source's spliced KV, which may remember
    text that the caller's list no longer shows.

    Args:
        client: alignment of the caller's own lists.
    """
    start = min(run.start for run in turn.lineage)
    place = _destination(diff, start)
    if all(run.end <= start for run in diff.kept) or any(
        edit.mode != "amortize" and edit.hunk.new_start <= place for edit in edits
    ):
        return list(edits)
    step = next(step for step in client.steps if step.kind != "kept" and step.old is not None)
    old = turn.prepared.client[step.old or 0]
    declared = step.new is not None and _states_its_own(prepared, step.new)
    name = DECLARED if declared else "undeclared"
    cause = Cause(name, "exact", str(old.get("role")), step.new, withheld=True)
    hunk = Hunk(start, start, place, place)
    return sorted(
        [*edits, Edit(hunk, (cause,), "exact", behind=True)],
        key=lambda edit: (edit.hunk.start, edit.hunk.new_start),
    )


def _states_its_own(prepared: Prepared, client_index: int) -> bool:
    """Return True if the caller declares that it made its own change of a message."""
    return any(
        change.callers_own
        for entry in prepared.sent
        if entry.client_index == client_index
        for change in entry.changes
    )


def _edits(diff: TokenDiff, finder: CauseFinder, quoted: int) -> list[Edit]:
    """Return explained hunks in order; those in the tail only if they demand forgetting.

    Args:
        quoted: end of the last quote in the prompt, which comes from elsewhere. It ends a tail.
    """
    edits: list[Edit] = []
    for each in diff.hunks:
        hunk = each
        if diff.tail <= hunk.new_start < quoted:
            hunk = replace(hunk, new_end=min(hunk.new_end, quoted))
        behind = hunk.new_start < max(diff.tail, quoted)
        causes = finder.explain(hunk) if behind or hunk.old_messages else ()
        mode = strictest(causes)
        if behind or mode == "forget":
            edits.append(Edit(hunk, causes, mode, behind))
    return edits


def _with_demands(
    edits: Sequence[Edit], demands: Sequence[Demand], diff: TokenDiff, prepared: Prepared
) -> list[Edit]:
    """Return the edits, plus a forget for each demand that none of them meets.

    A demand binds even if no token of the source differs: an earlier edit may have removed the span
    while its readers remained, or the model may have written it.
    """
    result = list(edits)
    for demand in demands:
        if any(
            cause.mode == "forget" and cause.message == demand.client_index
            for edit in result
            for cause in edit.causes
        ):
            continue
        cause = demand_cause(prepared, demand.client_index)
        for index, edit in enumerate(result):
            if edit.hunk.start <= demand.start <= max(edit.hunk.start, edit.hunk.end - 1):
                result[index] = Edit(edit.hunk, (*edit.causes, cause), "forget", edit.behind)
                break
        else:
            place = _destination(diff, demand.start)
            hunk = Hunk(demand.start, demand.end, place, place)
            result.append(Edit(hunk, (cause,), "forget", behind=False))
    return sorted(result, key=lambda edit: (edit.hunk.start, edit.hunk.new_start))


def demand_cause(prepared: Prepared, client_index: int) -> Cause:
    """Return the cause of the demand to forget a message of this turn."""
    mark = prepared.forget_marks[client_index]
    role = str(prepared.client[client_index].get("role"))
    return Cause(mark.cause, "forget", role, client_index)


def _destination(diff: TokenDiff, position: int) -> int:
    """Return the prompt position of the first kept source token at or after ``position``."""
    for run in diff.kept:
        if run.end > position:
            return run.dest + max(0, position - run.start)
    return diff.tail


def _usable(
    diff: TokenDiff,
    edits: Sequence[Edit],
    demands: Sequence[Demand],
    turn: RetainedTurn,
    recompute: Recompute,
) -> tuple[Kept, ...]:
    """Return kept runs before the first exact or forget edit.

    They exclude what is computed again and hidden readers.
    """
    cut = min((e.hunk.new_start for e in edits if e.mode != "amortize"), default=None)
    limit = len(turn.tokens)
    forgotten = [edit.hunk.start for edit in edits if edit.mode == "forget"]
    forgotten += [demand.start for demand in demands]
    if forgotten:
        # KV after an earlier splice may have read the span before it was moved.
        limit = min([*forgotten, *(run.start for run in turn.lineage)])
    usable: list[Kept] = []
    for run in diff.kept:
        if cut is not None and run.dest >= cut:
            break
        skip = recompute.boundary if run.dest > 0 else 0
        end = min(run.end, limit)
        if cut is not None:
            end = min(end, run.start + cut - run.dest)
        if end - run.start > skip:
            usable.append(Kept(run.start + skip, end, run.dest + skip))
    cuts = [(edit.hunk.start, edit.hunk.end) for edit in edits if edit.mode == "amortize"]
    if not (recompute.quotes and cuts):
        return tuple(usable)
    quotes = find_quotes(turn.tokens, cuts, recompute.quotes)
    return tuple(
        Kept(start, end, run.dest + start - run.start)
        for run in usable
        for start, end in uncovered((run.start, run.end), quotes)
    )


def records_of(own: Sequence[Edit], others: Sequence[Edit]) -> tuple[EditRecord, ...]:
    """Return the account of a turn: a source's edits, plus forgets that only other sources show.

    A forgotten message counts once, however many sources hold it.
    """
    told = {
        (cause.message, cause.cause)
        for edit in own
        if edit.behind
        for cause in edit.causes
        if cause.mode == "forget"
    }
    records: list[EditRecord] = []
    for index, edit in enumerate((*own, *others)):
        for cause in edit.causes:
            first_hand = index < len(own)
            if cause.mode == "forget" and not (first_hand and edit.behind):
                if (cause.message, cause.cause) in told:
                    continue
                told.add((cause.message, cause.cause))
            if first_hand or cause.mode == "forget":
                records.append(record_of(cause, edit.hunk, edit.behind))
    return tuple(records)


def record_of(cause: Cause, hunk: Hunk | None, behind: bool = False) -> EditRecord:
    """Return the record of one change; ``hunk`` is None for a change that no source shows."""
    return EditRecord(
        message=cause.message,
        role=cause.role,
        cause=cause.cause,
        mode=cause.mode,
        span=(hunk.start, hunk.end) if hunk is not None else None,
        replacement_tokens=hunk.new_end - hunk.new_start if hunk is not None and behind else 0,
    )
