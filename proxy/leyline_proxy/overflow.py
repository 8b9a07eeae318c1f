"""A prompt that doesn't fit into a model's context window."""

from __future__ import annotations

from dataclasses import dataclass

CODE = "context_length_exceeded"
"""OpenAI's code, on which clients compact."""

_NO_FIGURES = (
    "Your input exceeds the context window of this model: it is longer than the model's context "
    "length."
)


@dataclass(frozen=True, slots=True)
class Overflow:
    """The figures of a prompt that is too long, in tokens; None for those that nobody reported."""

    prompt: int | None = None
    limit: int | None = None
    """Size of the context window."""
    answer: int | None = None
    """Room that was asked for the answer, if only both together are too long."""

    @property
    def total(self) -> int | None:
        """Tokens that don't fit; None if unknown."""
        return None if self.prompt is None else self.prompt + (self.answer or 0)

    def counted(self, prompt: int) -> Overflow:
        """Return the figures with a count of the prompt, where the engine's stops short.

        vLLM reads no further than the end of the window.
        """
        alone = self.limit is None or prompt > self.limit
        if prompt <= (self.prompt or 0) or not (alone or self.answer):
            return self
        return Overflow(prompt, self.limit, None if alone else self.answer)

    def message(self, reason: str) -> str:
        """Return the error's text, in the words of OpenAI's API, which clients look for.

        Args:
            reason: the engine's own words; kept if they have what is missing here.
        """
        if self.limit is None:
            return f"{_NO_FIGURES} Please reduce the length of the messages.{_quoted(reason)}"
        known = f"This model's maximum context length is {self.limit} tokens."
        if self.prompt is None:
            return f"{known} Please reduce the length of the messages.{_quoted(reason)}"
        if self.answer is None:
            came = f"your messages resulted in {self.prompt} tokens"
            return f"{known} However, {came}. Please reduce the length of the messages."
        parts = f"{self.prompt} in the messages, {self.answer} in the completion"
        return (
            f"{known} However, you requested {self.total} tokens ({parts}). "
            "Please reduce the length of the messages or completion."
        )


def _quoted(reason: str) -> str:
    return f" The engine's words: {reason}" if reason else ""
