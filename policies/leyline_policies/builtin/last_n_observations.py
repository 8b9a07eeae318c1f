"""The policy that keeps the newest observations only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from leyline_policies.builtin.old_results import ShorterResults
from leyline_policies.builtin.tool_results import check_numbers, first_answer
from leyline_policies.context import Context
from leyline_policies.conversation import nth_last, tags_of
from leyline_policies.errors import did_you_mean, shown
from leyline_policies.marks import edit
from leyline_policies.policy import Message

_ROLES = ("tool", "function", "user")
_IMAGES = ("image_url", "input_image")
_KEEP, _REMOVE = "keep", "remove"
_MASKED = "Old environment output: ("


@dataclass(frozen=True, slots=True)
class LastNObservations(ShorterResults):
    """Replace all but the newest ``n`` observations by a line that counts what is omitted.

    Observations are the messages of ``roles`` after the first assistant message: tool results, and
    user messages too where a harness sends results so (``roles=[tool;function;user]``). With
    ``polling`` the cut moves only every so many observations: between ``n`` and ``n + polling`` are
    whole, and the cache is lost less often. Observations tagged with one of
    ``always_keep_output_for_tags`` stay whole however old, those tagged with one of
    ``always_remove_output_for_tags`` are removed however new.

    The rule is SWE-agent's ``LastNObservations`` (SWE-agent at 318f909,
    sweagent/agent/history_processors.py), in which the task counts as the first observation and
    always stays. Different from it: everything before the first assistant message counts as task or
    example, because SWE-agent's marks that distinguish them don't reach a model; and the last user
    message stays, regardless of its tags.
    """

    name: ClassVar[str] = "last_n_observations"

    n: int = 5
    polling: int = 1
    always_keep_output_for_tags: tuple[str, ...] = ("keep_output",)
    always_remove_output_for_tags: tuple[str, ...] = ("remove_output",)
    roles: tuple[str, ...] = ("tool", "function")

    def __post_init__(self) -> None:
        """Raise ValueError for a number below 1 or a role that holds no observations."""
        check_numbers(1, n=self.n, polling=self.polling)
        for role in self.roles:
            if role not in _ROLES:
                raise ValueError(
                    f"roles: {shown(role)} holds no observations{did_you_mean(role, _ROLES) or ';'}"
                    f" (known: {', '.join(_ROLES)})"
                )
        if not self.roles:
            raise ValueError("roles=[] names no role; leave it out for tool results")

    def _places(self, messages: list[Message], context: Context) -> Sequence[int]:
        found = context.where(messages, self._is_observation, "observation")
        found = found[bisect_left(found, first_answer(messages)) :] if found else found
        # The task is an observation too, the first one, and stays.
        count = len(found) + 1
        cut = max(0, count // self.polling * self.polling - self.n - 1)
        omitted = self._omitted(messages, found, cut, context)
        if "user" in self.roles:
            last_user = nth_last(messages, "user", 1)
            omitted = [index for index in omitted if index != last_user]
        return omitted

    def _shorter(self, message: Message) -> Message:
        """Return the observation as a line that counts its lines and images."""
        content = message.get("content")
        if isinstance(content, str) and content.startswith(_MASKED) and "\n" not in content:
            return message
        lines, images = _size(content)
        stub = f"{_MASKED}{lines} lines omitted)"
        return edit(message, stub=stub + (f" ({images} images omitted)" if images else ""))

    def _omitted(
        self, messages: list[Message], found: list[int], cut: int, context: Context
    ) -> list[int]:
        """Return the observations before the cut, corrected by their tags."""
        if not context.any(messages, self._said, "said"):
            return found[:cut]
        tagged = context.each(messages, self._said, "said")
        return [
            index
            for place, index in enumerate(found)
            if tagged[index] == _REMOVE or (place < cut and tagged[index] != _KEEP)
        ]

    def _is_observation(self, message: Message) -> bool:
        return message.get("role") in self.roles

    def _said(self, message: Message) -> str:
        """Return the verdict of the observation's tags."""
        if _tagged(message, self.always_remove_output_for_tags):
            return _REMOVE
        return _KEEP if _tagged(message, self.always_keep_output_for_tags) else ""


def _tagged(message: Message, tags: Sequence[str]) -> bool:
    if "tags" not in message and "leyline" not in message:
        return False
    return any(tag in tags for tag in tags_of(message))


def _size(content: object) -> tuple[int, int]:
    """Return the number of lines of text, and of images."""
    if isinstance(content, str):
        return len(content.splitlines()), 0
    parts = (
        [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    )
    lines = sum(len(part["text"].splitlines()) for part in parts if _is_text(part))
    return lines, sum(part.get("type") in _IMAGES for part in parts)


def _is_text(part: dict[str, object]) -> bool:
    return isinstance(part.get("text"), str)
