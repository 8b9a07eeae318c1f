"""What a policy may know besides the messages.

A policy asks for it by signature: ``transform(self, messages, turn_idx, context)``, or a function
``f(messages, turn_idx, context, *, settings…)``. The third parameter must be called ``context``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, TypeVar

from leyline_policies.conversation import ToolCall, is_user, text_of
from leyline_policies.failures import is_failed_result
from leyline_policies.marks import without_dropped
from leyline_policies.memo import Memo
from leyline_policies.policy import Message, Policy, wants_context

MAX_STATE_BYTES = 16 * 1024
"""Largest state of one policy, as JSON."""

State = dict[str, Any]
_KIND = re.compile(r"[a-z][a-z0-9_]{0,47}")
S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EditCost:
    """What an edit costs on the engine in use, as its receipts told; zeros until one came."""

    splices: bool = False
    """Whether the engine moves the KV behind an edit; if not, it is computed again."""
    prefill_us: float = 0.0
    """Microseconds to prefill one token."""
    splice_us: float = 0.0
    """Microseconds to move one token's KV."""

    def of(self, tokens_behind: int) -> float:
        """Microseconds that an edit costs with so many tokens behind it."""
        return tokens_behind * (self.splice_us if self.splices else self.prefill_us)


@dataclass(frozen=True, slots=True)
class Note:
    """Something that a policy reports without editing: a warning, what a dry run would do."""

    policy: str
    kind: str
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Completion:
    """Text that a policy wants a model to write, beside the request."""

    key: str
    messages: tuple[Message, ...] = field(repr=False)
    model: str
    """Empty for the session's own."""
    max_tokens: int


def texts_of(message: Message) -> Iterator[str]:
    """All that a chat template writes of a message: its text, its reasoning, its calls."""
    yield text_of(message)
    yield str(message.get("reasoning_content") or "")
    calls = [call for call in message.get("tool_calls") or () if isinstance(call, dict)]
    bodies = [call.get("function") or call.get("custom") for call in calls]
    for body in (*bodies, message.get("function_call")):
        if isinstance(body, dict):
            yield str(body.get("name") or "")
            yield str(body.get("arguments") or body.get("input") or "")


def approximate_tokens(message: Message) -> int:
    """Tokens of a message, roughly: a quarter of its characters, and three for its frame."""
    return sum(map(len, texts_of(message))) // 4 + 3


@dataclass(frozen=True, slots=True)
class Context:
    """Facts of the session, the policy's own state, and where it may report."""

    turn: int = 0
    """Turns that the session had before this one."""
    window: int | None = None
    """The model's context window in tokens; None where unknown."""
    idle_s: float = 0.0
    """Seconds since the session's last turn ended; 0 on the first."""
    model: str = ""
    cost: EditCost = field(default_factory=EditCost)
    state: State = field(default_factory=dict)
    """The policy's own, as JSON; what it leaves here it finds on the next turn."""
    count: Callable[[Message], int] = approximate_tokens
    memo: Memo = field(default_factory=Memo)
    policy: str = ""
    """Its name."""
    slot: str = ""
    """Its place in the pipeline, by which its results are told from another's."""
    rerun: bool = False
    """Whether the policy runs for the second time on this turn, on what others left."""
    elapsed_s: float = 0.0
    """Seconds since the session began."""
    notes: list[Note] = field(default_factory=list)
    completions: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What models have written for the session's policies."""
    wanted: list[Completion] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def tokens(self, message: Message) -> int:
        """Tokens of one message, counted once in its life."""
        return self.memo.get(message, TOKENS, self.count)

    def total(self, messages: Sequence[Message]) -> int:
        """Tokens of several messages."""
        return sum(self.each_tokens(messages))

    def each_tokens(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of each message; not to be changed."""
        return self.memo.map(messages, TOKENS, self.count, self._place)

    def calls(self, messages: list[Message]) -> tuple[ToolCall, ...]:
        """`pair_calls`, worked out once where policies change no call."""
        return self.memo.pairing(messages, self._place).calls

    def results(self, messages: list[Message]) -> tuple[int, ...]:
        """Where the tool results are, oldest first."""
        return self.memo.pairing(messages, self._place).results

    def users(self, messages: list[Message]) -> list[int]:
        """Where the user's messages are, oldest first."""
        are = self.memo.map(messages, _USER, is_user, self._place)
        return [*compress(range(len(messages)), are)]

    def failed(self, messages: list[Message]) -> list[bool]:
        """Which messages are tool results that say that their call failed."""
        return self.memo.map(messages, _FAILED, is_failed_result, self._place)

    @property
    def _place(self) -> str:
        return f"{self.slot}, again" if self.rerun else self.slot

    def once(self, message: Message, compute: Callable[[Message], T], key: object = None) -> T:
        """``compute(message)``, computed once in the message's life.

        The result may depend on the message and the policy's settings only. A policy with several
        such computations tells them apart by ``key``.
        """
        return self.memo.get(message, (self.slot, key), compute)

    def each(
        self,
        messages: Sequence[Message],
        compute: Callable[..., T],
        key: object = None,
        told: Sequence[Hashable] | None = None,
    ) -> list[T]:
        """`once` for all messages, at the cost of those that are new; not to be changed.

        Args:
            told: one thing more for each message; then it is ``compute(message, told)``.
        """
        return self.memo.map(messages, (self.slot, key), compute, self._place, told)

    def edited(
        self,
        messages: list[Message],
        compute: Callable[[Message], Message],
        places: Sequence[int],
        key: object = None,
    ) -> list[Message]:
        """The messages with `once` of those at ``places``; the same list if none differs.

        It costs what is new, in the messages and at the end of ``places``. Not to be changed.
        """
        return self.memo.edited(messages, (self.slot, key), compute, places, self._place)

    def any(
        self, messages: Sequence[Message], test: Callable[[Message], object], key: object = None
    ) -> bool:
        """Whether ``test`` holds for any message."""
        return self.memo.any(messages, (self.slot, key), test, self._place)

    def where(
        self, messages: Sequence[Message], test: Callable[[Message], object], key: object = None
    ) -> list[int]:
        """Indices of the messages for which ``test`` holds, which is asked as by `each`."""
        return [*compress(range(len(messages)), self.each(messages, test, key))]

    def fold(
        self,
        items: Sequence[S],
        step: Callable[[T, S], object],
        begin: Callable[[], T],
        *read: Sequence[Any],
        key: object = None,
    ) -> T:
        """What ``begin()`` becomes when ``step(state, item)`` has changed it for each item in turn.

        Items that go on from those of the last turn cost only what is new. What else ``step`` looks
        at is given as ``read``, and must go on as well (as values), or the state begins anew. It is
        the same object on every turn: only ``step`` may change it.
        """
        return self.memo.fold(items, step, begin, (self.slot, key), self._place, read)

    def complete(
        self, key: str, messages: Sequence[Message], *, model: str = "", max_tokens: int = 1_000
    ) -> str | None:
        """What a model answers to ``messages``; None until it has, on some later turn.

        The question is put beside the request, which doesn't wait. It is put once per ``key`` while
        the policy goes on asking; an answer that a turn doesn't ask for is forgotten.
        """
        answer = self.completed(key)
        if answer is None:
            place = f"{self.slot}:{key}"
            self.wanted.append(Completion(place, tuple(messages), model, max_tokens))
        return answer

    def completed(self, key: str) -> str | None:
        """The answer to an earlier question, if it has come."""
        place = f"{self.slot}:{key}"
        self.used.add(place)
        return self.completions.get(place)

    def note(self, kind: str, **values: float) -> None:
        """Report something for the response and the metrics; numbers only, never text.

        Raises:
            ValueError: ``kind`` is no short word of small letters, digits and ``_``.
        """
        if not _KIND.fullmatch(kind):
            raise ValueError(f"a note's kind is a short word such as near_limit, not {kind[:60]!r}")
        self.notes.append(Note(self.policy, kind, values))

    def inner(self, name: str, turn: int | None = None, idle_s: float | None = None) -> Context:
        """The context for a policy inside another: its state is a part of the outer one's."""
        state = self.state.setdefault("inner", {})
        return replace(
            self,
            turn=self.turn if turn is None else turn,
            idle_s=self.idle_s if idle_s is None else idle_s,
            state=state.setdefault(name, {}),
            slot=f"{self.slot}/{name}",
        )

    def attempt(self) -> Context:
        """The same context with states and notes that lead nowhere."""
        return replace(self, state=deepcopy(self.state), notes=[], wanted=[], used=set())


_FAILED, _USER = "failed", "user"
TOKENS = "tokens"
"""Key of a message's tokens in a memo."""


def run(policy: Policy, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
    """Call ``policy`` with what its signature asks for.

    The result may hold the marks of `leyline_policies.marks`, dropped messages included.
    """
    transform = policy.transform
    method = getattr(transform, "__func__", None)
    if wants_context(transform if method is None else method, method is not None):
        return transform(messages, turn_idx, context)
    return transform(messages, turn_idx)


def apply(
    policy: Policy, messages: list[Message], turn_idx: int, context: Context | None = None
) -> list[Message]:
    """The messages to send after ``policy``: `run` without what it dropped."""
    return without_dropped(run(policy, messages, turn_idx, context or Context(turn=turn_idx)))
