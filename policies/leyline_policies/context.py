"""Facts for policies besides the messages.

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

PICTURE_TOKENS = 1600
"""Estimate of the tokens of a picture, however many bytes it has: models take a screen at about
that."""

_PICTURES = frozenset({"image_url", "input_image", "image"})
State = dict[str, Any]
_KIND = re.compile(r"[a-z][a-z0-9_]{0,47}")
S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EditCost:
    """The cost of an edit on the engine in use, from its receipts; zeros until one came."""

    splices: bool = False
    """True if the engine moves the KV after an edit; if not, it is computed again."""
    prefill_us: float = 0.0
    """Microseconds to prefill one token."""
    splice_us: float = 0.0
    """Microseconds to move one token's KV."""
    anchor_tokens: int = 1
    """Tokens from one place with cached state to the next; 1 if the model has nothing but KV."""
    state_tokens: int = 0
    """Tokens whose KV takes as much memory as one recurrent state; 0 for models without any."""

    def of(self, tokens_behind: int) -> float:
        """Return the microseconds that an edit costs with so many tokens after it.

        On average, half of the tokens between two anchors are computed again on either side of it.
        """
        if not self.splices:
            return tokens_behind * self.prefill_us
        again = (self.anchor_tokens - 1) * self.prefill_us
        return (tokens_behind + self.state_tokens) * self.splice_us + again


@dataclass(frozen=True, slots=True)
class Note:
    """A policy's report without an edit: a warning, or the edit of a dry run."""

    policy: str
    kind: str
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Completion:
    """Text that a policy wants a model to write, beside the request."""

    key: str
    messages: tuple[Message, ...] = field(repr=False)
    model: str
    """Name of the model; empty for the session's own."""
    max_tokens: int
    continues: bool = False
    """True if the messages follow the conversation as it is sent."""
    policy: str = ""
    """Name of the policy that asks."""


def texts_of(message: Message) -> Iterator[str]:
    """Yield all that a chat template writes of a message: its text, its reasoning, its calls."""
    yield text_of(message)
    yield str(message.get("reasoning_content") or "")
    calls = [call for call in message.get("tool_calls") or () if isinstance(call, dict)]
    bodies = [call.get("function") or call.get("custom") for call in calls]
    for body in (*bodies, message.get("function_call")):
        if isinstance(body, dict):
            yield str(body.get("name") or "")
            yield str(body.get("arguments") or body.get("input") or "")


def picture_tokens(message: Message) -> int:
    """Estimate the tokens of a message's pictures: :data:`PICTURE_TOKENS` for each."""
    content = message.get("content")
    if type(content) is not list:
        return 0
    return PICTURE_TOKENS * sum(map(is_picture, content))


def is_picture(part: object) -> bool:
    """Return True if a part of a content is a picture, in any API's form."""
    return isinstance(part, dict) and part.get("type") in _PICTURES


def approximate_tokens(message: Message) -> int:
    """Estimate a message's tokens: a quarter of its characters, three for its frame, and
    :data:`PICTURE_TOKENS` for each picture."""
    return sum(map(len, texts_of(message))) // 4 + 3 + picture_tokens(message)


@dataclass(frozen=True, slots=True)
class Context:
    """Facts of the session, the policy's own state, and a place for its reports."""

    turn: int = 0
    """Number of the session's turns before this one."""
    window: int | None = None
    """The model's context window in tokens; None if unknown."""
    idle_s: float = 0.0
    """Seconds since the session's last turn ended; 0 on the first."""
    model: str = ""
    cost: EditCost = field(default_factory=EditCost)
    state: State = field(default_factory=dict)
    """The policy's own state, as JSON, which lasts from turn to turn."""
    count: Callable[[Message], int] = approximate_tokens
    memo: Memo = field(default_factory=Memo)
    policy: str = ""
    """The policy's name."""
    slot: str = ""
    """The policy's place in the pipeline, which separates its results from another's."""
    rerun: bool = False
    """True if the policy runs a second time on this turn, on the messages that others left."""
    elapsed_s: float = 0.0
    """Seconds since the session began."""
    notes: list[Note] = field(default_factory=list)
    completions: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Answers of models for the session's policies."""
    wanted: list[Completion] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def tokens(self, message: Message) -> int:
        """Return the tokens of one message, counted once in its life."""
        return self.memo.get(message, TOKENS, self.count)

    def total(self, messages: Sequence[Message]) -> int:
        """Return the tokens of several messages."""
        return sum(self.each_tokens(messages))

    def each_tokens(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of each message; not to be changed."""
        return self.memo.map(messages, TOKENS, self.count, self._place)

    def calls(self, messages: list[Message]) -> tuple[ToolCall, ...]:
        """Return `pair_calls`, computed once while policies change no call."""
        return self.memo.pairing(messages, self._place).calls

    def results(self, messages: list[Message]) -> tuple[int, ...]:
        """Return the places of the tool results, oldest first."""
        return self.memo.pairing(messages, self._place).results

    def users(self, messages: list[Message]) -> list[int]:
        """Return the places of the user's messages, oldest first."""
        are = self.memo.map(messages, _USER, is_user, self._place)
        return [*compress(range(len(messages)), are)]

    def failed(self, messages: list[Message]) -> list[bool]:
        """Return True for each message that is a tool result of a failed call."""
        return self.memo.map(messages, _FAILED, is_failed_result, self._place)

    @property
    def _place(self) -> str:
        return f"{self.slot}, again" if self.rerun else self.slot

    def once(self, message: Message, compute: Callable[[Message], T], key: object = None) -> T:
        """Return ``compute(message)``, computed once in the message's life.

        The result may depend on the message and the policy's settings only. A policy with several
        such computations distinguishes them by ``key``.
        """
        return self.memo.get(message, (self.slot, key), compute)

    def each(
        self,
        messages: Sequence[Message],
        compute: Callable[..., T],
        key: object = None,
        told: Sequence[Hashable] | None = None,
    ) -> list[T]:
        """Return `once` for all messages, at the cost of new ones; not to be changed.

        Args:
            told: a further argument for each message; then it is ``compute(message, told)``.
        """
        return self.memo.map(messages, (self.slot, key), compute, self._place, told)

    def edited(
        self,
        messages: list[Message],
        compute: Callable[[Message], Message],
        places: Sequence[int],
        key: object = None,
    ) -> list[Message]:
        """Return the messages with `once` of those at ``places``; the same list if none differs.

        The cost is that of the new messages and new ``places``. Not to be changed.
        """
        return self.memo.edited(messages, (self.slot, key), compute, places, self._place)

    def any(
        self, messages: Sequence[Message], test: Callable[[Message], object], key: object = None
    ) -> bool:
        """Return True if ``test`` holds for any message."""
        return self.memo.any(messages, (self.slot, key), test, self._place)

    def where(
        self, messages: Sequence[Message], test: Callable[[Message], object], key: object = None
    ) -> list[int]:
        """Return the indices of messages for which ``test`` holds, which is called as by `each`."""
        return [*compress(range(len(messages)), self.each(messages, test, key))]

    def fold(
        self,
        items: Sequence[S],
        step: Callable[[T, S], object],
        begin: Callable[[], T],
        *read: Sequence[Any],
        key: object = None,
    ) -> T:
        """Return ``begin()``, changed by ``step(state, item)`` for each item in turn.

        Items that continue those of the last turn cost only the new ones. Any other input of
        ``step`` is given as ``read``, and must continue as well (as values), or the state begins
        again. It is the same object on every turn: only ``step`` may change it.
        """
        return self.memo.fold(items, step, begin, (self.slot, key), self._place, read)

    def complete(
        self, key: str, messages: Sequence[Message], *, model: str = "", max_tokens: int = 1_000
    ) -> str | None:
        """Return a model's answer to ``messages``; None until it has come, on some later turn.

        The question is sent beside the request, which doesn't wait. It is sent once per ``key``
        while the policy continues to ask; an answer that a turn doesn't ask for is forgotten.
        """
        return self._asked(key, messages, model, max_tokens)

    def continue_with(self, key: str, message: Message, *, max_tokens: int = 1_000) -> str | None:
        """Return the session's model's answer to ``message``, put after the conversation as this
        turn sends it; None until it has come, as by `complete`.

        The engine has the conversation in its cache and prefills the message alone. Where a later
        turn has the answer in place of messages, by an edit that amortizes, the engine
        moves the KV under which the answer was written.
        """
        return self._asked(key, (message,), "", max_tokens, continues=True)

    def _asked(
        self,
        key: str,
        messages: Sequence[Message],
        model: str,
        max_tokens: int,
        *,
        continues: bool = False,
    ) -> str | None:
        answer = self.completed(key)
        if answer is None:
            place, asked = f"{self.slot}:{key}", tuple(messages)
            self.wanted.append(Completion(place, asked, model, max_tokens, continues, self.policy))
        return answer

    def completed(self, key: str) -> str | None:
        """Return the answer to an earlier question, if it has come."""
        place = f"{self.slot}:{key}"
        self.used.add(place)
        return self.completions.get(place)

    def note(self, kind: str, **values: float) -> None:
        """Report something for the response and the metrics; numbers only, never text.

        Raises:
            ValueError: ``kind`` isn't a short word of small letters, digits and ``_``.
        """
        if not _KIND.fullmatch(kind):
            raise ValueError(f"a note's kind is a short word such as near_limit, not {kind[:60]!r}")
        self.notes.append(Note(self.policy, kind, values))

    def inner(self, name: str, turn: int | None = None, idle_s: float | None = None) -> Context:
        """Return the context for a policy inside another; its state is part of the outer one's."""
        state = self.state.setdefault("inner", {})
        return replace(
            self,
            turn=self.turn if turn is None else turn,
            idle_s=self.idle_s if idle_s is None else idle_s,
            state=state.setdefault(name, {}),
            slot=f"{self.slot}/{name}",
        )

    def attempt(self) -> Context:
        """Return the same context with states and notes that lead nowhere."""
        return replace(self, state=deepcopy(self.state), notes=[], wanted=[], used=set())


_FAILED, _USER = "failed", "user"
TOKENS = "tokens"
"""Key of a message's tokens in a memo."""


def run(policy: Policy, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
    """Call ``policy`` with the arguments of its signature.

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
    """Return the messages to send after ``policy``: `run` without dropped ones."""
    return without_dropped(run(policy, messages, turn_idx, context or Context(turn=turn_idx)))
