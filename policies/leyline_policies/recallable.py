"""A wrapper that leaves a stub with an address where a policy evicts text.

- A message that the policy shortened gets the stub after its text, on a line of its own. Where the
  policy put a placeholder without a cause, the stub takes its place. The model's own words are left
  alone: the stub of an assistant message goes where one of a removed message would.
- Removed messages become parts by runs (`leyline_policies.runs`). Their stubs go into the message
  that the policy put in or edited beside the gap, else into the last tool result or user message
  before it, else into the first one after it. The user's last message is used if there is no other.
- What isn't worth a stub stays: a message that would not get shorter, and the whole of a policy's
  edits if the stubs of removed messages cost more than the messages.

Instructions, thinking in members of its own, arguments of calls that stay, and pictures get no
stub, nor does anything that is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, pairwise
from operator import is_not
from typing import Any, NamedTuple

from leyline_policies.alignment import align_changed, identities
from leyline_policies.changes import changed_places
from leyline_policies.compose import Wrapper
from leyline_policies.context import Context, run
from leyline_policies.conversation import (
    BEARERS,
    INSTRUCTION_ROLES,
    RESULT_ROLES,
    ToolCall,
    nth_last,
    tags_of,
    text_of,
    with_partners,
)
from leyline_policies.marks import Mark, MarkedMessage, is_dropped, mark_of
from leyline_policies.policy import Message, Policy
from leyline_policies.promises import forgets
from leyline_policies.recall import sources_of
from leyline_policies.runs import Removed, RunParts, called_at
from leyline_policies.stubs import Evicted, address_of, stub_lines
from leyline_policies.verbs import is_annotated, is_forgotten, pinned

_CAUSE = "recall"


@dataclass(frozen=True, slots=True)
class Recallable(Wrapper):
    """A policy whose evicted texts have addresses."""

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the inner policy's messages, with stubs."""
        edited = run(self.policy, messages, turn_idx, context.inner(self.policy.name))
        if edited is messages or self.policy.mode != "amortize":
            return edited
        # Protected messages, which bear no stub either.
        guarded = getattr(self.policy, "guarded", None)
        return _Edits(messages, edited, context, self.policy.name, guarded).with_stubs()


def recallable(policy: Policy) -> Policy:
    """Return ``policy`` with a stub and an address for each text that it evicts.

    Raises:
        ValueError: the policy forgets.
    """
    if policy.mode == "forget":
        raise ValueError(
            f"recallable=true: {policy.name} forgets, and what is forgotten has no way back; "
            "leave out recallable"
        )
    return Recallable(policy)


class _Own(NamedTuple):
    """An edited message: what is sent in its place, and the part of which others bear the stub."""

    message: Message
    part: Evicted | None = None


class _Spot(NamedTuple):
    """Texts that went, of which another message bears the stubs."""

    at: int
    """Place in the edited list before which they were, or of their own message."""
    parts: tuple[Evicted, ...]
    tokens: int
    """Number of tokens that are gone."""
    nested: tuple[Evicted, ...] = ()
    """Parts of which ``parts`` show the stubs."""
    put_in: int | None = None
    """Place of a message that the policy put in for them."""


@dataclass(frozen=True)  # no slots: what most turns don't need is computed on demand
class _Edits:
    """One turn's edits of the inner policy."""

    messages: list[Message]
    edited: list[Message]
    context: Context
    policy: str
    guard: Callable[[list[Message], Context], set[int]] | None

    def with_stubs(self) -> list[Message]:
        """Return the edited messages with stubs; the very list that was given if nothing is."""
        given, result = self.messages, list(self.edited)
        places = changed_places(given, result) if len(given) == len(result) else None
        if places is not None and all(_in_place(result[at], given[at]) for at in places):
            pairs, spots = [*zip(places, places, strict=True)], list[_Spot]()
        else:
            pairs, spots = self._aligned()
        olds, news = [given[old] for old, _ in pairs], [result[new] for _, new in pairs]
        owns = self.context.memo.pairs(olds, news, (self.context.slot, "own"), self._own)
        for (old, new), own in zip(pairs, owns, strict=True):
            result[new] = own.message
            if own.part is not None:
                gone = self._tokens(given[old]) - self._tokens(own.message)
                spots.append(_Spot(new, (own.part,), gone))
        if spots and not self._place(sorted(spots, key=lambda spot: spot.at), result):
            return given
        same = len(result) == len(given) and not any(map(is_not, result, given))
        return given if same else result

    def _tokens(self, message: Message) -> int:
        return self.context.tokens(message)

    @cached_property
    def _known(self) -> Mapping[int, int]:
        """Places of the given messages by identity."""
        return {id(message): at for at, message in enumerate(self.messages)}

    @cached_property
    def _calls(self) -> Mapping[int, ToolCall]:
        """The call that each result answers, by the result's place."""
        calls = self.context.calls(self.messages)
        return self.context.fold(calls, _note_results, dict[int, ToolCall], key=_CAUSE)

    @cached_property
    def _untouchable(self) -> set[int]:
        """Identities of messages that bear no stub: pinned and protected ones."""
        kept: set[int] = set()
        if self.context.any(self.messages, is_annotated, _CAUSE):
            calls = self.context.calls(self.messages)
            kept |= with_partners(pinned(self.messages), calls)
        if self.guard is not None:
            kept |= self.guard(self.messages, self.context)
        return {id(self.messages[at]) for at in kept}

    @cached_property
    def _last_user(self) -> int | None:
        """Identity of the user's last message."""
        at = nth_last(self.messages, "user", 1)
        return None if at is None else id(self.messages[at])

    def _tool(self, at: int) -> str:
        message, call = self.messages[at], self._calls.get(at)
        if message.get("role") not in RESULT_ROLES:
            return ""
        return call.name if call is not None else str(message.get("name") or "")

    def _own(self, old: Message, new: Message) -> _Own:
        """Return what is sent in place of ``old``, which the policy edited to ``new``."""
        role = str(new.get("role"))
        if role in INSTRUCTION_ROLES or forgets(new, {id(old)}) or _holds(new, old):
            return _Own(new)
        text = text_of(old)
        mark = mark_of(new)
        if mark is not None and "".join(each.text for each in mark.evicted) == text:
            return _Own(new)  # the policy has left the addresses itself
        bare = {"role": role, "content": text}
        part = Evicted(
            address_of(text),
            text,
            role,
            self._tool(self._known[id(old)]),
            self._tokens(old) if role in RESULT_ROLES else self.context.count(bare),
            self.policy,
            tags_of(old),
            sources=sources_of(old),
        )
        if role not in BEARERS:
            stub = {"role": "user", "content": part.stub}
            gone = self._tokens(old) - self._tokens(new)
            small = gone <= self.context.count(stub) and _same_calls(old, new)
            return _Own(old) if small else _Own(new, part)
        stubbed = _stubbed(new, old, part)
        less = self._tokens(stubbed) < self._tokens(old) or _pictures(new) < _pictures(old)
        return _Own(stubbed if less else old)

    def _aligned(self) -> tuple[list[tuple[int, int]], list[_Spot]]:
        """Return the places of edited messages in both lists, and the gaps of removed ones."""
        given, edited = self.messages, self.edited
        found, first, last = align_changed(given, edited)
        gone = {old: edited[new] for old, new in found if is_dropped(edited[new])}
        kept = [(old, new) for old, new in found if old not in gone]
        spots = [
            spot
            for (old, new), (next_old, next_new) in pairwise([first, *kept, last])
            if (spot := self._gap(range(old + 1, next_old), range(new + 1, next_new), gone))
        ]
        return [pair for pair in kept if edited[pair[1]] is not given[pair[0]]], spots

    def _gap(self, olds: range, news: range, dropped: Mapping[int, Message]) -> _Spot | None:
        """Return the spot of messages that are gone from between two that stay."""
        put_in = [new for new in news if not is_dropped(self.edited[new])]
        moved = {each for new in put_in for each in identities(self.edited[new])}
        gone = [
            old
            for old in olds
            if id(self.messages[old]) not in moved
            and not is_forgotten(self.messages[old])
            and not (old in dropped and forgets(dropped[old], {id(self.messages[old])}))
        ]
        if not gone:
            return None
        first = self.messages[gone[0]]
        run = self.context.memo.get(first, (self.context.slot, "run"), _new_run)
        told = [self.messages[old] for old in gone]
        parts = run.of(told, self.policy, lambda: self._removed(gone))
        if not parts:
            return None
        bears = [new for new in put_in if self.edited[new].get("role") in BEARERS]
        if not self._untouchable.isdisjoint(map(id, told)):
            bears = []  # a pinned message comes back, and may replace what was put in
        return _Spot(news.stop, parts, run.tokens, run.nested, bears[0] if bears else None)

    def _removed(self, gone: Sequence[int]) -> Iterator[Removed]:
        """Yield removed messages with all that their text shows."""
        places = set(gone)
        for at in gone:
            message, call = self.messages[at], self._calls.get(at)
            asked = ""
            if call is not None and call.message not in places:
                asked = called_at(self.messages[call.message], call)
            yield Removed(message, self._tokens(message), self._tool(at), asked)

    def _place(self, spots: Iterable[_Spot], result: list[Message]) -> bool:
        """Write the stubs of spots into ``result``; False if that isn't possible or worth it."""
        borne: dict[int, list[_Spot]] = {}
        for spot in spots:
            bearer = self._bearer(spot, result)
            if bearer is None:
                return False
            borne.setdefault(bearer, []).append(spot)
        left = 0
        for at, own in borne.items():
            parts = tuple(part for spot in own for part in spot.parts)
            nested = tuple(part for spot in own for part in spot.nested)
            before = result[at]
            is_given = id(before) in self._known
            bear = partial(_bearing, parts=parts, nested=nested, layer=is_given)
            key = (_CAUSE, is_given, tuple(part.address for part in parts))
            result[at] = self.context.once(before, bear, key)
            gone = sum(spot.tokens for spot in own)
            left += gone - (self._tokens(result[at]) - self._tokens(before))
        return left > 0

    def _bearer(self, spot: _Spot, result: Sequence[Message]) -> int | None:
        """Return the place of the message that bears the stubs of a spot."""
        beside = [spot.at - 1, spot.at]
        if spot.put_in is not None:
            beside.insert(0, spot.put_in)
        for at in beside:
            edited = 0 <= at < len(result) and id(result[at]) not in self._known
            if edited and self._bears(result[at]):
                return at
        last: int | None = None
        for place in chain(range(spot.at - 1, -1, -1), range(spot.at, len(result))):
            if self._bears(result[place]):
                if self._last_user not in identities(result[place]):
                    return place
                last = place
        return last

    def _bears(self, message: Message) -> bool:
        if message.get("role") not in BEARERS or is_dropped(message):
            return False
        return self._untouchable.isdisjoint(identities(message)) and not forgets(
            message, self._known
        )


def _in_place(new: Message, old: Message) -> bool:
    return isinstance(new, MarkedMessage) and new.origin is old and not new.mark.dropped


def _note_results(found: dict[int, ToolCall], call: ToolCall) -> None:
    found.update(dict.fromkeys(call.results, call))


def _new_run(_: Message) -> RunParts:
    return RunParts()


def _holds(new: Message, old: Message) -> bool:
    """Return True if ``new`` still has each text of ``old``, in order."""
    whole, at = text_of(new), 0
    content = old.get("content")
    for text in map(_text, content) if isinstance(content, list) else (text_of(old),):
        found = whole.find(text, at)
        if found < 0:
            return False
        at = found + len(text)
    return True


def _text(part: Any) -> str:
    return text_of({"content": [part]})


def _pictures(message: Message) -> int:
    """Return the number of parts that are no text."""
    content = message.get("content")
    return sum(not _is_text(part) for part in content) if isinstance(content, list) else 0


def _is_text(part: Any) -> bool:
    return isinstance(part, str) or (isinstance(part, dict) and isinstance(part.get("text"), str))


def _same_calls(old: Message, new: Message) -> bool:
    return all(old.get(key) == new.get(key) for key in ("tool_calls", "function_call"))


def _stubbed(new: Message, old: Message, part: Evicted) -> Message:
    """Return an edited message with the stub of its own text."""
    mark = mark_of(new) or Mark()
    replaces = mark.stub and mark.cause is None
    content = part.stub if replaces else _with_lines(new.get("content"), part.stub)
    mark = replace(mark, evicted=(*mark.evicted, part))
    origin = new.origin if isinstance(new, MarkedMessage) else old
    return MarkedMessage({**new, "content": content}, origin, mark)


def _bearing(
    message: Message, parts: tuple[Evicted, ...], nested: tuple[Evicted, ...], layer: bool
) -> Message:
    """Return a message with the stubs of others' texts.

    Args:
        layer: True if the policy hasn't edited it.
    """
    content = _with_lines(message.get("content"), stub_lines(parts))
    mark, origin = Mark(cause=_CAUSE), message
    if isinstance(message, MarkedMessage) and not layer:
        mark, origin = message.mark, message.origin
    mark = replace(mark, evicted=(*mark.evicted, *parts, *nested))
    return MarkedMessage({**message, "content": content}, origin, mark)


def _with_lines(content: Any, lines: str) -> Any:
    """Return a content with lines after it."""
    if isinstance(content, list):
        return [*content, {"type": "text", "text": f"\n{lines}"}]
    return f"{content}\n{lines}" if isinstance(content, str) and content else lines
