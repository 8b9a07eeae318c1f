"""What must be forgotten once it is taken out, whichever policy takes it out."""

from __future__ import annotations

from leyline_policies import Memo, SpecError, load_pipeline
from leyline_policies.builtin.redact import Redact

from ..model.messages import Message
from .edited import Sensitive

_FOUND = "sensitive"


def sensitive_content(settings: str) -> Redact | None:
    """What to look for, from the settings of `redact`: ``detectors=[keys;email]``.

    Raises:
        leyline_policies.PolicyError: they can't be read, or mean nothing.
    """
    if not settings:
        return None
    (policy, *more) = load_pipeline(f"redact:{settings}")
    if more or not isinstance(policy, Redact):
        raise SpecError("sensitive says what to look for, as redact does, and nothing else")
    return policy


def sensitive_rule(content: Redact | None, memo: Memo) -> Sensitive | None:
    """The rule for one session; a message is searched once."""
    if content is None:
        return None

    def found(message: Message) -> frozenset[str]:
        return memo.get(message, _FOUND, content.found_in)

    return found
