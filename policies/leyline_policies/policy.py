"""The interface of a policy.

A policy decides *what* to edit in an agent's history; how the engine's KV cache follows is not
its concern. It is anything with a name, a mode and a ``transform``::

    class ShortPastes:
        name = "short_pastes"
        mode = "amortize"

        def __init__(self, limit: int = 2000) -> None:
            self.limit = limit

        def transform(self, messages, turn_idx):
            return [map_text(m, lambda text: text[: self.limit]) for m in messages]

or, shorter, a plain function, whose keyword-only parameters become the policy's settings::

    def short_pastes(messages, turn_idx, *, limit: int = 2000):
        return [map_text(m, lambda text: text[:limit]) for m in messages]

Installed under the entry-point group ``leyline.policies``, either is chosen by
``"short_pastes:limit=500"``. `leyline_policies.conversation` has ``map_text`` and other helpers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, Protocol

Message = dict[str, Any]
"""An OpenAI chat message as decoded JSON; keys that a policy does not know must survive it."""

Mode = Literal["amortize", "forget"]
"""An edit's promise.

``amortize``: the KV computed after the edited text is kept and moved; later tokens have already
read that text, so it may still influence the model. For tidying up.
``forget``: nothing that was computed after reading the edited text survives. For redaction.
"""

CONTEXT = "context"
"""Name of the parameter by which a policy asks for a `leyline_policies.context.Context`."""

MODES: tuple[Mode, ...] = ("amortize", "forget")

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

TransformFunction = Callable[..., list[Message]]
"""``f(messages, turn_idx, [context,] *, settings…) -> messages``."""


class Policy(Protocol):
    """A deterministic edit of an agent's history.

    ``transform`` is given the whole conversation as the client sent it on this turn (never its own
    earlier result) and the turn's number in the session, counted from 0. It returns the messages to
    send. It must not change its input: return new message dictionaries for what it edits and the
    given ones for what it does not. The same input must give the same output, or every turn edits
    the history again and nothing of the cache is kept. A tool call and its result stay or go
    together, and the last user message stays. A policy that raises, or that breaks these rules, is
    skipped for the turn and counted; the request continues without it.
    """

    # A policy that never changes anything may say so with an attribute ``edits = False``: then it
    # isn't run. One that never changes the messages it is given and always ends soon may say so
    # with ``trusted = True``: then it gets no copy of the messages and no time limit. One of
    # the mode amortize that marks single edits as forget says so with ``forgets = True``.

    @property
    def name(self) -> str:
        """The name in specs, receipts and metrics: the one that it is registered under."""

    @property
    def mode(self) -> Mode:
        """The promise of the policy's edits."""

    @property
    def transform(self) -> TransformFunction:
        """``transform(messages, turn_idx)``: returns the messages to send instead of ``messages``.

        With a third parameter, ``context``, it gets a `leyline_policies.context.Context`.
        """


@dataclass(frozen=True, slots=True)
class FunctionPolicy:
    """A plain function as a policy; it gets ``settings`` as keyword arguments."""

    name: str
    mode: Mode
    function: TransformFunction
    settings: tuple[tuple[str, object], ...] = ()
    forgets: bool = False
    """True if it marks single edits as forget, whatever its mode."""

    def transform(
        self, messages: list[Message], turn_idx: int, context: object = None
    ) -> list[Message]:
        """Call the function, with the context if it takes one."""
        given = (messages, turn_idx)
        if wants_context(self.function):
            return self.function(*given, context, **dict(self.settings))
        return self.function(*given, **dict(self.settings))

    def with_settings(self, **settings: object) -> FunctionPolicy:
        """Return the same policy with ``settings`` in place of those it has."""
        return replace(self, settings=tuple(settings.items()))


@lru_cache(maxsize=1024)
def wants_context(function: Callable[..., object], bound: bool = False) -> bool:
    """Return True if a ``transform`` or policy function takes the context as third argument.

    Args:
        bound: True if ``function`` takes the instance before all arguments.
    """
    taken = inspect.signature(function).parameters.values()
    positional = [each.name for each in taken if each.kind in _POSITIONAL]
    return positional[2 + bound : 3 + bound] == [CONTEXT]


def function_policy(
    *, name: str | None = None, mode: Mode = "amortize", forgets: bool = False
) -> Callable[[TransformFunction], FunctionPolicy]:
    """Make a policy of ``f(messages, turn_idx, *, …)``, as a decorator.

    Only needed to give a function another name, to give it the mode ``forget``, or if it marks
    single edits as such: a bare function can be registered as it is, under its own name and as
    ``amortize``.
    """

    def wrap(function: TransformFunction) -> FunctionPolicy:
        return FunctionPolicy(name or function.__name__, mode, function, forgets=forgets)

    return wrap
