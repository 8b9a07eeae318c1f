"""Content that must be forgotten once any policy removes it."""

from __future__ import annotations

from leyline_policies import Memo, SpecError, load_pipeline
from leyline_policies.builtin.redact import Redact

from ..model.messages import Message
from .edited import Sensitive

_FOUND = "sensitive"


def sensitive_content(settings: str) -> Redact | None:
    """Return a search for content, from the settings of `redact`: ``detectors=[keys;email]``.

    Raises:
        leyline_policies.PolicyError: they can't be read, or mean nothing.
    """
    if not settings:
        return None
    try:
        (policy, *more) = load_pipeline(f"redact:{settings}")
    except SpecError as error:
        raise SpecError(f"sensitive: {error}") from error
    if more or not isinstance(policy, Redact):
        raise SpecError("sensitive says what to look for, as redact does, and nothing else")
    return policy


def sensitive_rule(content: Redact | None, memo: Memo) -> Sensitive | None:
    """Return the rule for one session; each message is searched once."""
    if content is None:
        return None

    def found(message: Message) -> frozenset[str]:
        return memo.get(message, _FOUND, content.found_in)

    return found
