"""The interface of what an evaluation measures: a model that answers a prompt in several ways."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leyline_engine.contract import Capability, Directive, Receipt
from leyline_lab.errors import SubjectError
from leyline_lab.fidelity.rendering import Rendered


@dataclass(frozen=True, slots=True)
class Answer:
    """An arm's answer to a prompt."""

    first: NDArray[np.float32]
    """Logits [vocab] of its first token; of an endpoint natural log probabilities, NaN for tokens
    that it didn't report."""
    tokens: tuple[int, ...]
    """Tokens decoded greedily, up to the end of the message."""
    text: str
    receipt: Receipt


class Subject(ABC):
    """One model, and the arms that answer with it; no arm finds anything of another's."""

    name: str
    fingerprint: str
    length: int
    """Maximum number of tokens of an answer."""
    tokenizer: Any
    ordinary: tuple[int, ...]
    """Tokens that random text is made of."""
    max_context: int
    """Maximum number of tokens of a prompt and its answer."""
    has_control: bool
    """True if it can splice without rotation."""
    _known: tuple[array[int], Answer] | None = None

    @abstractmethod
    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        opened: bool = True,
    ) -> Rendered:
        """Render a conversation with the model's own template.

        Args:
            opened: True if the assistant's next message begins at the end.

        Raises:
            SubjectError: the template refuses the messages.
        """

    @abstractmethod
    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text, without special ones."""

    def fits(self, tokens: int) -> bool:
        """Return True if the model takes a prompt of so many tokens and an answer."""
        return tokens + self.length + 1 <= self.max_context

    def check_fits(self, prompt: Sequence[int]) -> None:
        """Raise SubjectError if a prompt and its answer don't fit the model's context."""
        if not self.fits(len(prompt)):
            raise SubjectError(
                f"{self.name} takes {self.max_context} tokens, too few for a prompt of "
                f"{len(prompt)}"
            )

    def check_splices(self, capability: Capability) -> None:
        """Raise SubjectError if the engine can't splice the model's KV."""
        if not capability.splices:
            raise SubjectError(
                f"{self.name} can't be spliced: {capability.unsupported_reason or 'unknown model'}"
            )

    def whole(self, prompt: Sequence[int]) -> Answer:
        """Answer a prompt like :meth:`prefilled`, and remember the answer.

        Several edits in a row are compared with the same history.
        """
        wanted = array("q", prompt)
        if self._known is None or self._known[0] != wanted:
            self._known = wanted, self.prefilled(wanted)
        return self._known[1]

    @abstractmethod
    def prefilled(self, prompt: Sequence[int]) -> Answer:
        """Answer a prompt that is prefilled from an empty cache.

        Raises:
            SubjectError: it doesn't fit the model's context, or can't be answered.
        """

    @abstractmethod
    def spliced(
        self,
        source: Sequence[int],
        edits: Sequence[Directive],
        then: Sequence[int] = (),
        *,
        rotated: bool = True,
    ) -> Answer:
        """Answer an edited prompt over the KV of the whole one.

        Args:
            source: the whole prompt, which is prefilled first.
            edits: directives on it.
            then: tokens that come after it, and are prefilled after the splice.
            rotated: False for the control, whose moved keys keep their old rotation.

        Raises:
            SubjectError: the engine didn't splice, a prompt doesn't fit the model's context, or
                there is no control.
        """
