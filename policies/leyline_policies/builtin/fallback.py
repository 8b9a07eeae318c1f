"""The policy that uses the first of several policies that works."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leyline_policies.builtin.inner import adopt, check_inner, check_limit, limit_of, trusts
from leyline_policies.builtin.tool_results import check_numbers
from leyline_policies.context import Context, run
from leyline_policies.faults import OnFault, strictest_on_fault
from leyline_policies.marks import without_dropped
from leyline_policies.policy import Message, Mode, Policy

_OVER = "over"


@dataclass(frozen=True, slots=True)
class Fallback:
    """Use the first of ``policies`` that works, such as a summary and, without one, a cut.

    A policy works if it raises nothing and what it leaves has no more than ``max_tokens`` tokens
    (or ``max_fraction`` of the model's window). One that raises is passed over at once, and so is
    one that has left too much for ``patience_turns`` turns: until then its messages are sent, for
    a model may still be writing its summary. The last one's messages are sent even if they are too
    many. Each policy is given the conversation itself, on every turn: as soon as an earlier one
    works again, it is used again. Without a limit, only a policy that raises is passed over. The
    note ``fallback`` reports the number of policies that were passed over.

    The rule is that of pydantic-ai-harness 0.62 (``FallbackCompaction``). Different from it: no
    request waits for a model, so an answer that doesn't come in time counts as a failure, and any
    exception does.
    """

    name: ClassVar[str] = "fallback"
    mode: ClassVar[Mode] = "amortize"

    policies: tuple[Policy, ...]
    max_tokens: int | None = None
    max_fraction: float | None = None
    patience_turns: int = 5

    def __post_init__(self) -> None:
        """Raise ValueError for no policies, one that forgets, or a number out of range."""
        check_inner("policies", self.policies)
        check_limit("max", self.max_tokens, self.max_fraction)
        check_numbers(0, patience_turns=self.patience_turns)

    @property
    def trusted(self) -> bool:
        """True if all of them are trusted."""
        return trusts(self.policies)

    @property
    def on_fault(self) -> OnFault | None:
        """The strictest choice among them, for when all fail."""
        return strictest_on_fault(self.policies)

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the messages after the first policy that works.

        Raises:
            Exception: the last policy's, if all raise.
        """
        limit = limit_of(self.max_tokens, self.max_fraction, context)
        since = context.state.get(_OVER, context.turn)
        waited = (context.turn - since) // self.patience_turns if self.patience_turns else None
        failure: Exception | None = None
        left: list[Message] | None = None
        used = 0
        for place, policy in enumerate(self.policies):
            tried = context.attempt()
            try:
                after = run(policy, messages, turn_idx, tried.inner(f"{place}.{policy.name}"))
                total = context.total(without_dropped(after))
            except Exception as error:  # whatever it raises, the next one is for
                failure = error
                continue
            adopt(context, tried)
            fits = limit is None or total <= limit
            left, used = after, place
            if place == 0 and fits:
                context.state.pop(_OVER, None)
            else:
                context.state[_OVER] = since
            if fits or (waited is not None and place >= waited):
                break
        if left is None:
            assert failure is not None  # noqa: S101  # there are policies, and each raised
            raise failure
        if used:
            context.note("fallback", passed_over=used)
        return left
