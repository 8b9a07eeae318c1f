"""Names of a turn's messages: those under which earlier turns knew them.

A message keeps its name if an earlier turn had it unchanged, if it is the answer after the list
that it answers, or if it was certainly rewritten between the same neighbours. Any other message
gets a new name, and the names of all messages that it may have been as former names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rapidfuzz.distance import LCSseq

from leyline_engine.contract import output_span

from ..model.diff import MAX_COMPARED_CELLS, common_subsequence, diff_messages
from ..model.messages import Message, call_ids, text_of
from ..model.prepared import DECLARED, Prepared
from ..model.rendered import Rendered
from ..model.session import Departed, RetainedTurn
from ..model.spans import ANYTHING, SpanName, SpanNames, outer_extents

MAX_FORMER = 256
"""Largest number of former names; more become :data:`~.spans.ANYTHING`."""

SAME_ANSWER = 0.75
"""Smallest share of tokens that an answer has in common with its text in a prompt."""


def name_spans(
    turn: str,
    prepared: Prepared,
    turns: Sequence[RetainedTurn],
    departed: Departed,
    prompt: Rendered | None,
) -> SpanNames:
    """Name a turn's messages.

    Args:
        turn: the turn's own name, unique in the session; new names begin with it.
        turns: retained ones, newest last.
        departed: names that no retained turn has.
        prompt: distinguishes several answers to one list; None if tokens aren't known.
    """
    naming = _Naming(prepared)
    alignments = [_align(source, prepared) for source in reversed(turns)]
    for alignment in alignments:
        naming.keep(alignment)
    naming.name_answers(alignments, departed, _said_at(prepared, prompt))
    naming.name_rewritten(alignments)
    naming.suspect_returning(turns, departed)
    naming.suspect_kin(prepared.forget_marks, turns, departed)
    client = naming.names(turn)
    return SpanNames(client, _sent_names(turn, prepared, client, turns))


@dataclass(frozen=True, slots=True)
class _Alignment:
    """A retained turn's client list aligned with this turn's."""

    source: RetainedTurn
    pairs: Sequence[tuple[int, int]] | None
    """Old and new indices of shared messages; None if one list begins with the other."""
    gaps: tuple[tuple[range, range], ...]
    """Old and new messages between two pairs."""
    follower: int | None
    """Index of the message after the source's last one, if that is kept."""


def _align(source: RetainedTurn, prepared: Prepared) -> _Alignment:
    before, now = source.prepared.client_fingerprints, prepared.client_fingerprints
    if now[: len(before)] == before:
        return _Alignment(source, None, (), len(before))
    pairs = common_subsequence(before, now)
    gaps: list[tuple[range, range]] = []
    old_at = new_at = 0
    for old, new in [*pairs, (len(before), len(now))]:
        if old_at < old or new_at < new:
            gaps.append((range(old_at, old), range(new_at, new)))
        old_at, new_at = old + 1, new + 1
    last_old, last_new = pairs[-1] if pairs else (-1, -1)
    follower = last_new + 1 if last_old == len(before) - 1 else None
    return _Alignment(source, pairs, tuple(gaps), follower)


class _Naming:
    """Names as they are found, best evidence first."""

    def __init__(self, prepared: Prepared) -> None:
        self._client = prepared.client
        self._prints = prepared.client_fingerprints
        self._own: list[str | None] = [None] * len(self._client)
        self._former: list[tuple[str, ...]] = [()] * len(self._client)
        self._taken: set[str] = set()
        self._inherited: list[SpanName | None] = [None] * len(self._client)
        """The names held by the newest turn that has each message."""
        self._answers: set[int] = set()
        """Indices of answers to a whole list, even if the author is uncertain."""

    def keep(self, alignment: _Alignment) -> None:
        """Adopt the names of the messages that a source shares with this turn."""
        names, prints = alignment.source.names.client, alignment.source.prepared.client_fingerprints
        if not alignment.gaps and tuple(self._inherited[: len(names)]) == names:
            return  # an earlier turn of the continued one
        ids = [name.id for name in names]
        if alignment.pairs is None and not self._taken and len(set(ids)) == len(ids):
            # This is the newest turn, which this one continues: nothing has been named yet.
            self._own[: len(ids)], self._inherited[: len(ids)] = ids, names
            self._taken.update(ids)
            for place, name in enumerate(names):
                self._suspect(place, name.former)
            return
        removed: dict[int, list[SpanName]] = {}
        for olds, _ in alignment.gaps:
            for old in olds:
                removed.setdefault(prints[old], []).append(names[old])
        pairs = alignment.pairs
        if pairs is None:
            pairs = [(place, place) for place in range(len(names))]
        for old, new in pairs:
            name = names[old]
            if self._own[new] is None and name.id not in self._taken:
                self._take(new, name.id)
                self._inherited[new] = name
            elif self._own[new] != name.id:
                self._suspect(new, (name.id,))
            self._suspect(new, name.former)
            for twin in removed.get(prints[old], ()) if removed else ():
                self._suspect(new, twin.all)  # either of two equal messages may have remained

    def name_answers(
        self,
        alignments: Sequence[_Alignment],
        departed: Departed,
        said_at: Callable[[int], Sequence[int]],
    ) -> None:
        """Name answers of earlier turns that the client's list may contain now."""
        roles = [message.get("role") for message in self._client]
        written = [a for a in alignments if a.source.output_ids and not a.source.for_policy]
        unclaimed = [alignment for alignment in written if self._free(alignment.source)]
        following: dict[int, list[RetainedTurn]] = {}
        for alignment in unclaimed:
            place = alignment.follower
            if place is not None and place < len(roles) and roles[place] == "assistant":
                following.setdefault(place, []).append(alignment.source)
        for place, sources in following.items():
            author = _author(sources, said_at(place))
            if self._own[place] is None:
                self._answers.add(place)
                if author is not None:
                    self._take(place, output_span(author.turn))
            self._suspect(place, tuple(output_span(source.turn) for source in sources))
        for place, role in enumerate(roles):
            if role != "assistant" or self._own[place] is not None:
                continue
            self._suspect(place, departed.outputs)
            for alignment in unclaimed:  # the caller may have put it anywhere
                if self._free(alignment.source):
                    self._suspect(place, (output_span(alignment.source.turn),))

    def name_rewritten(self, alignments: Sequence[_Alignment]) -> None:
        """Name rewritten messages: any message may have become any other between its neighbours."""
        for alignment in alignments:
            names, before = alignment.source.names.client, alignment.source.prepared.client
            for olds, news in alignment.gaps:
                lost = [old for old in olds if names[old].id not in self._taken]
                if not lost or not news:
                    continue
                unnamed = [
                    new for new in news if self._own[new] is None and new not in self._answers
                ]
                for old, new in _rewritten(before, lost, self._client, unnamed):
                    self._take(new, names[old].id)
                every = _bounded(name for old in lost for name in names[old].all)
                for new in news:
                    self._suspect(new, every)

    def suspect_returning(self, turns: Sequence[RetainedTurn], departed: Departed) -> None:
        """Suspect messages that earlier turns had elsewhere: an equal text may be the same."""
        for place, value in enumerate(self._prints):
            if self._own[place] is None:
                for source in turns:
                    for name in source.names_by_print.get(value, ()):
                        self._suspect(place, name.all)
                self._suspect(place, departed.messages.get(value, ()))

    def suspect_kin(
        self, places: Iterable[int], turns: Sequence[RetainedTurn], departed: Departed
    ) -> None:
        """Suspect messages once made from these, even if they have left the list."""
        for place in places:
            own = self._own[place]
            wanted = {*self._former[place], *([own] if own is not None else [])}
            for source in turns:
                for name in source.names.client:
                    if not wanted.isdisjoint(name.former):
                        self._suspect(place, (name.id,))
            for every in departed.messages.values():
                if not wanted.isdisjoint(every):
                    self._suspect(place, every)

    def names(self, turn: str) -> tuple[SpanName, ...]:
        """Return the names; a message without one gets a new one."""
        return tuple(
            [
                known
                if known is not None and not former and not known.former
                else self._name(turn, place)
                for place, (known, former) in enumerate(
                    zip(self._inherited, self._former, strict=True)
                )
            ]
        )

    def _name(self, turn: str, place: int) -> SpanName:
        own, former, known = self._own[place], self._former[place], self._inherited[place]
        # A message with its own name in this list isn't another message of it.
        former = tuple(name for name in former if name not in self._taken)
        if known is not None and known.former == former:
            return known
        return SpanName(own if own is not None else f"{turn}.{place}", former)

    def _free(self, source: RetainedTurn) -> bool:
        return output_span(source.turn) not in self._taken

    def _take(self, place: int, name: str) -> None:
        self._own[place] = name
        self._taken.add(name)

    def _suspect(self, place: int, names: tuple[str, ...]) -> None:
        known = self._former[place]
        if names and names != known:
            self._former[place] = _bounded((*known, *names)) if known else names


def _bounded(names: Iterable[str]) -> tuple[str, ...]:
    unique = tuple(dict.fromkeys(names))
    return unique if len(unique) <= MAX_FORMER and ANYTHING not in unique else (ANYTHING,)


def _said_at(prepared: Prepared, prompt: Rendered | None) -> Callable[[int], Sequence[int]]:
    """Return a function from a client index to its tokens with surroundings; empty for none."""

    def said(place: int) -> Sequence[int]:
        sent = [entry.client_index for entry in prepared.sent]
        if prompt is None or place not in sent:
            return ()
        start, end = outer_extents(prompt, len(sent))[sent.index(place)]
        return prompt.tokens[start:end]

    return said


def _author(sources: Sequence[RetainedTurn], said: Sequence[int]) -> RetainedTurn | None:
    """Return the turn whose answer ``said`` holds, in tokens with surroundings; None if uncertain.

    An engine's template may strip or rewrite a part of an answer, such as its thinking.
    """
    best, author = 0.0, None
    for source in sources:
        shorter = min(len(source.output_ids), len(said))
        if not shorter or len(source.output_ids) * len(said) > MAX_COMPARED_CELLS:
            continue
        share = LCSseq.similarity(source.output_ids, said) / shorter
        if share == best:
            author = None
        elif share > best:
            best, author = share, source
    return author if best >= SAME_ANSWER else None


def _rewritten(
    before: Sequence[Message], olds: Sequence[int], now: Sequence[Message], news: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield pairs of an old message and a new one that is certainly its rewritten form.

    They make or answer the same tool calls, or half of the shorter text is in both.
    """
    if not olds or not news:
        return
    steps = diff_messages([before[old] for old in olds], [now[new] for new in news]).steps
    for step in steps:
        if step.kind != "replaced" or step.old is None or step.new is None:
            continue
        old, new = before[olds[step.old]], now[news[step.new]]
        length, other = len(text_of(old)), len(text_of(new))
        shared = length - sum(edit.end - edit.start for edit in step.chars)
        by_call = bool(call_ids(old)) or isinstance(old.get("tool_call_id"), str)
        if by_call or 0 < min(length, other) <= 2 * shared:
            yield olds[step.old], news[step.new]


def _sent_names(
    turn: str,
    prepared: Prepared,
    client: Sequence[SpanName],
    turns: Sequence[RetainedTurn],
) -> tuple[tuple[str, ...], ...]:
    """Return the names of the messages whose text each sent message holds.

    A policy's text may contain parts of the messages that it dropped, so it has their names as
    well.
    """
    if not prepared.dropped and [each.client_index for each in prepared.sent] == [
        *range(len(client))
    ]:
        return tuple([(name.id,) for name in client])
    result: list[tuple[str, ...]] = []
    inserts = len(prepared.sent) + len(prepared.dropped) > len(client)
    earlier = _inserted_names(turns) if inserts else {}
    for place, entry in enumerate(prepared.sent):
        if entry.client_index is not None:
            own = client[entry.client_index].id
        else:
            # Each of several equal ones needs its own name.
            known = earlier.pop(prepared.sent_fingerprints[place], None)
            own = known if known is not None else f"{turn}.{len(client) + place}"
        told: list[str] = []
        if entry.changes and prepared.dropped:
            policies = {change.cause for change in entry.changes} - {DECLARED}
            dropped = (d for d in prepared.dropped if d.change.cause in policies)
            told = [client[each.client_index].id for each in dropped]
        result.append((own, *told))
    return tuple(result)


def _inserted_names(turns: Sequence[RetainedTurn]) -> dict[int, str]:
    """Return the names of messages that policies inserted in retained turns, by fingerprint."""
    return {
        value: names[0]
        for source in turns
        for entry, value, names in zip(
            source.prepared.sent,
            source.prepared.sent_fingerprints,
            source.names.sent,
            strict=True,
        )
        if entry.client_index is None
    }
