"""Pairs of messages of an edited list and the list before it.

Messages that `leyline_policies.marks` made name their origin. For messages that a policy copied by
hand, those that share a tool call belong together, then equal ones; the rest between these pairs up
if both lists have the same roles there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import compress, count, pairwise
from operator import is_not

from leyline_policies.marks import MarkedMessage, is_dropped, longest_rising, pair_by_origin
from leyline_policies.policy import Message

Pairs = list[tuple[int, int]]
_MAX_COMPARED = 1 << 18
"""Pairs of messages beyond which only messages that are unique in each list are compared: a matcher
that looks at all takes minutes for thousands that are alike."""


def align(before: Sequence[Message], after: Sequence[Message]) -> Pairs:
    """Return index pairs in order, each index at most once."""
    pairs = pair_by_origin(before, after)
    if len(pairs) == len(before) == len(after):
        return pairs
    # A message that a policy moved is no copy of the one at its new place.
    old_ids, new_ids = set(map(id, before)), set(map(id, after))
    for message in after:
        if isinstance(message, MarkedMessage):
            new_ids |= identities(message)
    loose = (
        {index for index, message in enumerate(before) if id(message) not in new_ids},
        {
            index
            for index, message in enumerate(after)
            if id(message) not in old_ids and old_ids.isdisjoint(identities(message))
        },
    )
    for match in (_single, _same_call, _equal, _same_roles):
        pairs = _refined(before, after, pairs, loose, match)
        if len(pairs) == min(len(before), len(after)):
            break
    return pairs


def align_changed(
    before: Sequence[Message], after: Sequence[Message]
) -> tuple[Pairs, tuple[int, int], tuple[int, int]]:
    """Return the pairs between the messages that both lists begin and end with, and these ends.

    Returns:
        The pairs, by places in the whole lists; the places just before the part that is compared,
        and just after it.
    """
    head = _shared_start(before, after)
    tail = _shared_start(before[::-1], after[::-1])
    tail = min(tail, len(before) - head, len(after) - head)
    ends = len(before) - tail, len(after) - tail
    pairs = align(before[head : ends[0]], after[head : ends[1]])
    return [(old + head, new + head) for old, new in pairs], (head - 1, head - 1), ends


def _shared_start(first: Sequence[Message], second: Sequence[Message]) -> int:
    """Return the number of messages that both lists begin with."""
    differ: Iterator[int] = compress(count(), map(is_not, first, second))
    return next(differ, min(len(first), len(second)))


def put_back(
    before: Sequence[Message], after: Sequence[Message], kept: Collection[int]
) -> list[Message]:
    """Return ``after`` with the messages ``kept`` of ``before`` as they were, in their places.

    If the fate of a kept message is unknown, all around it stays as it was.
    """
    result: list[Message] = []
    mine = {id(before[index]) for index in kept}
    present = {each for message in after for each in identities(message)}
    for old, new in _pieces(align(before, after), len(before), len(after)):
        gone = [index for index in old if index in kept]
        # One that is elsewhere now is put back here and removed there.
        came = [m for m in (after[index] for index in new) if mine.isdisjoint(identities(m))]
        if gone:
            roles = {before[index].get("role") for index in old}
            if any(m.get("role") in roles and not is_dropped(m) for m in came):
                gone = [i for i in old if i in kept or id(before[i]) not in present]
            came = [m for m in came if m.get("role") not in roles]
        # Messages that the policy added stay before those that it removed and must give back.
        result += [*came, *(before[index] for index in gone)]
        if old.stop < len(before):
            result.append(before[old.stop] if old.stop in kept else after[new.stop])
    return result


def rejoin(
    whole: Sequence[Message], live: Sequence[Message], after: Sequence[Message]
) -> list[Message]:
    """Return ``after``, made of ``live``, with the rest of ``whole`` in its old places."""
    alive = set(map(id, live))
    became = dict(align(live, after))
    result: list[Message] = []
    at = seen = 0
    for message in whole:
        if id(message) in alive:
            end = became.get(seen, at - 1) + 1
            result += after[at:end]
            at, seen = max(at, end), seen + 1
        else:
            result.append(message)
    return [*result, *after[at:]]


def identities(message: Message) -> set[int]:
    """Return the identities of a message and of those that it was made from."""
    found = {id(message)}
    while isinstance(message, MarkedMessage) and id(message.origin) not in found:
        message = message.origin
        found.add(id(message))
    return found


def _pieces(pairs: Pairs, old_end: int, new_end: int) -> Iterator[tuple[range, range]]:
    """Yield the ranges between the pairs; where a range stops, the next pair is."""
    for (old, new), (next_old, next_new) in pairwise([(-1, -1), *pairs, (old_end, new_end)]):
        yield range(old + 1, next_old), range(new + 1, next_new)


_Match = Callable[[Sequence[Message], Sequence[Message]], Pairs]


def _refined(
    before: Sequence[Message],
    after: Sequence[Message],
    pairs: Pairs,
    loose: tuple[Collection[int], Collection[int]],
    match: _Match,
) -> Pairs:
    """Return ``pairs`` and those that ``match`` finds between them among the ``loose`` ones."""
    result: Pairs = []
    for old, new in _pieces(pairs, len(before), len(after)):
        left = [index for index in old if index in loose[0]]
        right = [index for index in new if index in loose[1]]
        if left and right:
            found = match([before[index] for index in left], [after[index] for index in right])
            result += [(left[i], right[j]) for i, j in found]
        if old.stop < len(before):
            result.append((old.stop, new.stop))
    return result


def _single(old: Sequence[Message], new: Sequence[Message]) -> Pairs:
    """Pair one for one, as where a policy edits here and there: then nothing need be compared."""
    return _same_roles(old, new) if len(old) == len(new) == 1 else []


def _equal(old: Sequence[Message], new: Sequence[Message]) -> Pairs:
    return _common(
        *([json.dumps(m, sort_keys=True, default=repr) for m in each] for each in (old, new))
    )


def _same_call(old: Sequence[Message], new: Sequence[Message]) -> Pairs:
    """Pair by the id of the answered call, or the ids of the calls made."""
    pairs = _common([_call_key(m, "o") for m in old], [_call_key(m, "n") for m in new])
    return [(i, j) for i, j in pairs if old[i].get("role") == new[j].get("role")]


def _call_key(message: Message, other: str) -> Hashable:
    answered = message.get("tool_call_id")
    if isinstance(answered, str):
        return "result", answered
    calls = message.get("tool_calls")
    made = [call.get("id") for call in calls or () if isinstance(call, dict)]
    # A message without calls matches nothing: its key names its list.
    return ("calls", str(made[0])) if made else ("none", other)


def _same_roles(old: Sequence[Message], new: Sequence[Message]) -> Pairs:
    if [m.get("role") for m in old] != [m.get("role") for m in new]:
        return []
    return [(index, index) for index in range(len(old))]


def _common(old: Sequence[Hashable], new: Sequence[Hashable]) -> Pairs:
    if old == new:
        return [(index, index) for index in range(len(old))]
    if len(old) * len(new) > _MAX_COMPARED:
        return _anchors(old, new)
    blocks = SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    return [(block.a + i, block.b + i) for block in blocks for i in range(block.size)]


def _anchors(old: Sequence[Hashable], new: Sequence[Hashable]) -> Pairs:
    """Return pairs of messages that are unique in each list, as many as possible."""
    olds, news = Counter(old), Counter(new)
    places = {key: index for index, key in enumerate(old) if olds[key] == news[key] == 1}
    return longest_rising([(places[key], index) for index, key in enumerate(new) if key in places])
