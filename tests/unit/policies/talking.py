"""Sessions of one policy, turn by turn, with a model that answers on command."""

from __future__ import annotations

from typing import Any

from leyline_policies import Message, Policy, load_pipeline
from leyline_policies.context import Completion, Context, Note, apply
from leyline_policies.memo import Memo


class Talk:
    """Turns of a session, whose messages have ten tokens each."""

    def __init__(self, policy: Policy | str) -> None:
        self.policy = load_pipeline(policy)[0] if isinstance(policy, str) else policy
        self.turn = -1
        self.state: dict[str, Any] = {}
        self.completions: dict[str, str] = {}
        self.wanted: list[Completion] = []
        self.notes: list[Note] = []
        self._memo = Memo()

    def send(self, messages: list[Message], **facts: Any) -> list[Message]:
        """One turn: what is sent of the messages."""
        self.turn += 1
        self._memo.next_turn()
        context = Context(
            turn=self.turn,
            state=self.state,
            completions=self.completions,
            memo=self._memo,
            slot="0",
            **{"count": lambda message: 10, **facts},
        )
        sent = apply(self.policy, messages, self.turn, context)
        self.wanted, self.notes = context.wanted, context.notes
        self.completions = {k: v for k, v in self.completions.items() if k in context.used}
        return sent

    def answer(self, text: str) -> None:
        """The model has written."""
        self.completions[self.wanted[0].key] = text
