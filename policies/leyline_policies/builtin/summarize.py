"""The policy that replaces the older part of a long conversation by a summary of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from leyline_policies.builtin.asking import ask_about, asked_part
from leyline_policies.builtin.notes import with_note
from leyline_policies.builtin.tool_results import check_numbers
from leyline_policies.builtin.transcripts import joined_print, print_of, told
from leyline_policies.context import Context
from leyline_policies.conversation import RESULT_ROLES, instructions_end, nth_last
from leyline_policies.policy import Message, Mode

TASK = (
    "Summarize this conversation, so that you can go on with the summary in place of it. Keep what "
    "you were asked to do, what you found out (names, paths, values, errors), what you have "
    "changed, which ways failed, and what is left to do. Be exact and brief. Call no tool. Write "
    "the summary alone."
)
"""Asks the model for a summary of the conversation in front of it."""

_TASK_OF_ANOTHER = (
    "You summarize the conversation of a software agent, so that it can go on without it. Keep "
    "what it was asked to do, what it found out (names, paths, values, errors), what it has "
    "changed, which ways failed, and what is left to do. Be exact and brief. Write the summary "
    "alone."
)

HEADING = "Here is a summary of the conversation to date:\n\n"


@dataclass(frozen=True, slots=True)
class _Standing:
    """A summary of the messages before ``end``, except the message ``kept`` (-1 for none)."""

    end: int
    kept: int
    text: str

    def told(self, bearer: Message) -> Message:
        """Return the message that carries the summary."""
        if self.kept < 0:
            return {"role": "user", "content": HEADING + self.text}
        return with_note(bearer, HEADING + self.text, cause="summary")


@dataclass(frozen=True, slots=True)
class Summarize:
    """Replace the older part of a long conversation by a summary that a model writes.

    Once there are ``trigger_tokens`` tokens or more (or ``trigger_fraction`` of the model's
    window), the model is asked for a summary, beside the request: this turn and those after it are
    sent in full, until the summary has come. From then on it replaces the messages before those
    that were the newest ``keep_messages``; when the conversation has grown again, the next summary
    includes the last one. Instructions at the front stay, calls stay with their results; the user's
    last message stays, and carries the summary. If the summarized part changes (a secret is
    redacted in it), the summary is dropped.

    The session's own model is asked after the conversation as it was sent, so that it has read all
    of it, and only the question is prefilled. Another ``model`` is given the older part as text,
    cut to its newest ``summarized_tokens`` tokens by whole messages. With a ``focus``,
    the summaries written from then on give it particular weight.

    The rule is that of LangChain's ``SummarizationMiddleware`` (langchain 1.5.2). Different from
    it: no request waits for the summary, and the user's last message stays.
    """

    name: ClassVar[str] = "summarize"
    mode: ClassVar[Mode] = "amortize"
    trusted: ClassVar[bool] = True

    trigger_tokens: int | None = 100_000
    trigger_fraction: float | None = None
    keep_messages: int = 20
    summarized_tokens: int = 4_000
    summary_tokens: int = 800
    model: str = ""
    focus: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError for a number out of range or a policy that would never act."""
        check_numbers(
            1,
            trigger_tokens=self.trigger_tokens,
            keep_messages=self.keep_messages,
            summarized_tokens=self.summarized_tokens,
            summary_tokens=self.summary_tokens,
        )
        if self.trigger_fraction is not None and not 0 < self.trigger_fraction <= 1:
            raise ValueError(f"trigger_fraction={self.trigger_fraction} must be above 0, at most 1")
        if self.trigger_tokens is None and self.trigger_fraction is None:
            raise ValueError("trigger_tokens and trigger_fraction are both none; give one")

    def with_focus(self, focus: str) -> Summarize:
        """Return a policy whose next summaries give particular weight to ``focus``."""
        return replace(self, focus=focus)

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the messages with the summary in place of those that it covers."""
        front = instructions_end(messages)
        if not context.state and not self._is_due(messages, context):
            return messages
        prints = context.each(messages, print_of)
        standing = self._last(prints, front, context)
        sent = self._sent(messages, front, standing, context)
        least = standing.end if standing is not None else front
        cut = self._cut(messages, least) if self._is_due(sent, context) else least
        asked = self._asked(prints, front, least, cut, context)
        if asked is None:
            return sent
        end, key = asked["end"], asked["key"]
        text = self._answer(key, sent[front : len(sent) - (len(messages) - end)], context)
        if text is None:
            return sent
        last_user = nth_last(messages, "user", 1)
        kept = last_user if last_user is not None and front <= last_user < end else -1
        del context.state["asked"]
        context.state["standing"] = {"end": end, "key": key, "kept": kept}
        return self._sent(messages, front, _Standing(end, kept, text), context)

    def _asked(
        self, prints: Sequence[str], front: int, least: int, cut: int, context: Context
    ) -> dict[str, Any] | None:
        """Return the part that is being summarized, or that up to ``cut`` from now on, or None."""
        asked = asked_part(context, prints, front, least)
        if asked is not None or cut <= least:
            return asked
        return ask_about(context, prints, front, cut)

    def _last(self, prints: Sequence[str], front: int, context: Context) -> _Standing | None:
        """Return the last summary, if it still covers the messages that are there."""
        known = context.state.get("standing")
        if known is None:
            return None
        end, key = known["end"], known["key"]
        if not front < end <= len(prints) or joined_print(prints[front:end]) != key:
            del context.state["standing"]
            return None
        text = context.completed(key)
        return None if text is None else _Standing(end, known["kept"], text)

    def _sent(
        self, messages: list[Message], front: int, standing: _Standing | None, context: Context
    ) -> list[Message]:
        if standing is None:
            return messages
        # Kept with a message of the conversation, so that it is the same object on every turn.
        bearer = messages[standing.kept if standing.kept >= 0 else standing.end - 1]
        told: Message = context.once(bearer, standing.told, standing)
        return [*messages[:front], told, *messages[standing.end :]]

    def _is_due(self, sent: Sequence[Message], context: Context) -> bool:
        total = context.total(sent)
        if self.trigger_tokens is not None and total >= self.trigger_tokens:
            return True
        window = context.window
        return bool(self.trigger_fraction and window and total >= self.trigger_fraction * window)

    def _cut(self, messages: Sequence[Message], least: int) -> int:
        """Return where the newest messages begin, calls with their results."""
        cut = len(messages) - self.keep_messages
        while least < cut < len(messages) and messages[cut].get("role") in RESULT_ROLES:
            cut -= 1
        return cut

    def _answer(self, key: str, span: Sequence[Message], context: Context) -> str | None:
        """Return the summary of ``span``, if it has come."""
        if self.model in ("", context.model):
            task: Message = {"role": "user", "content": self._task(TASK)}
            return context.continue_with(key, task, max_tokens=self.summary_tokens)
        question = self._question(span, context)
        return context.complete(key, question, model=self.model, max_tokens=self.summary_tokens)

    def _task(self, task: str) -> str:
        return f"{task} Give particular weight to: {self.focus}" if self.focus else task

    def _question(self, span: Sequence[Message], context: Context) -> list[Message]:
        """Return the question to another model: the newest part of ``span`` that fits, as text."""
        left, newest = self.summarized_tokens, list[str]()
        for message in reversed(span):
            left -= context.tokens(message)
            if left < 0 and newest:
                break
            newest.append(told(message)[-8 * self.summarized_tokens :])
        transcript = "\n\n".join(reversed(newest))
        return [
            {"role": "system", "content": self._task(_TASK_OF_ANOTHER)},
            {"role": "user", "content": f"<conversation>\n{transcript}\n</conversation>"},
        ]
