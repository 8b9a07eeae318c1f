"""The rules of the policies' test kit, checked on recorded sessions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from warnings import catch_warnings, simplefilter

from leyline_policies import Policy
from leyline_policies.testing import (
    RULES,
    NothingEditedWarning,
    RuleBrokenError,
    Session,
    check_policy,
)
from leyline_proxy.edits.fault_origins import origin_of
from leyline_proxy.model.prepared import FaultOrigin


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """The first rule that a policy breaks."""

    policy: str
    rule: str
    demand: str
    """The rule in words."""
    place: str
    """Session, turn and message."""
    detail: str
    """The way in which it is broken; the type of the error, if the policy raised one."""
    origin: FaultOrigin | None = None


@dataclass(frozen=True, slots=True)
class RuleCheck:
    """The rules of the test kit on some of the recorded turns."""

    turns: int
    """Number of turns that were checked."""
    of: int
    """Number of turns that are recorded."""
    checked: tuple[str, ...] = ()
    """The policies that were checked."""
    broken: tuple[BrokenRule, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the form that `leyline policies try --json` writes."""
        return {
            "turns": self.turns,
            "of": self.of,
            "policies": list(self.checked),
            "broken": [asdict(each) for each in self.broken],
        }


def check_rules(
    policies: Sequence[Policy],
    sessions: Sequence[tuple[str, Session]],
    *,
    most_turns: int,
    window: int | None,
    without: Collection[str] = (),
) -> RuleCheck:
    """Check each policy by itself, on the client's own messages.

    Args:
        sessions: their names and requests.
        most_turns: bound of the turns that are played, the first ones.
        window: the model's context window in tokens.
        without: names of policies that aren't played, such as those that hang.
    """
    played = [*_first(sessions, most_turns)]
    total = sum(len(requests) for _, requests in sessions)
    turns = sum(len(requests) for _, requests in played)
    if not turns:
        return RuleCheck(0, total)
    chosen = [
        each for each in policies if getattr(each, "edits", True) and each.name not in without
    ]
    broken = [found for each in chosen if (found := _broken(each, played, window)) is not None]
    names = tuple(dict.fromkeys(each.name for each in chosen))
    return RuleCheck(turns, total, names, tuple(broken))


def _first(
    sessions: Sequence[tuple[str, Session]], most_turns: int
) -> Iterator[tuple[str, Session]]:
    """Yield the sessions with the first turns, the last one perhaps cut."""
    left = most_turns
    for name, requests in sessions:
        if left <= 0:
            return
        yield name, requests[:left]
        left -= len(requests)


def _broken(
    policy: Policy, sessions: Sequence[tuple[str, Session]], window: int | None
) -> BrokenRule | None:
    try:
        with catch_warnings():
            simplefilter("ignore", NothingEditedWarning)  # the trial's verdict says it
            check_policy(policy, [requests for _, requests in sessions], window=window)
    except RuleBrokenError as error:
        place = f"session {sessions[error.session][0]}, turn {error.turn}"
        if error.message is not None:
            place += f", message {error.message}"
        # The words of a policy's own error may quote a prompt.
        origin = origin_of(error.__cause__) if error.__cause__ is not None else None
        detail = origin.error if origin is not None else error.detail
        return BrokenRule(policy.name, error.rule, RULES[error.rule], place, detail, origin)
    return None
