"""A player of sessions to a policy, which checks the rules at every turn."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from warnings import warn

from leyline_policies.context import Context, State, run
from leyline_policies.errors import did_you_mean
from leyline_policies.marks import without_dropped
from leyline_policies.memo import Memo
from leyline_policies.policy import Message, Policy, TransformFunction
from leyline_policies.spec import policy_of
from leyline_policies.testing.rules import (
    CHECKS,
    RULES,
    Breach,
    Call,
    NothingEditedWarning,
    RuleBrokenError,
    is_message_list,
    is_unchanged,
)
from leyline_policies.testing.sessions import Session, synthetic_sessions

_LONG_SLEEP_S = 3600.0
Render = Callable[[list[Message]], object]


@dataclass(frozen=True, slots=True)
class Report:
    """A policy's results on sessions on which it kept the rules."""

    policy: str
    sessions: int = 0
    turns: int = 0
    edited_turns: int = 0
    """Number of turns on which it sent other messages than it was given."""
    rewrites: int = 0
    """Number of turns on which it changed what it sent before: each costs the cache an edit."""
    given_tokens: int = 0
    sent_tokens: int = 0

    @property
    def reclaimed_tokens(self) -> int:
        """Prompt tokens saved, over all turns, by an approximate count."""
        return self.given_tokens - self.sent_tokens


def check_policy(
    policy: Policy | type[Policy] | TransformFunction,
    sessions: Sequence[Session] | None = None,
    *,
    settings: Mapping[str, object] | None = None,
    name: str | None = None,
    render: Render | None = None,
    window: int | None = 128_000,
    without: Collection[str] = (),
) -> Report:
    """Play sessions to a policy and check every rule in `RULES` at every turn.

    Each turn's state goes to the next, the session sleeps for an hour at every fifth turn, and a
    message that stays is the same object from turn to turn. If the policy edits nothing, a
    `NothingEditedWarning` says so.

    Args:
        policy: a policy, or the class or function of one.
        sessions: see `Session`; without them, `synthetic_sessions`.
        settings: of the class or function, typed: its own, and those that every policy takes.
        name: the one that it is registered under; without it, its own.
        render: called with the messages to send (a chat template, say); may raise anything. Turns
            whose given messages it refuses aren't rendered.
        window: the model's context window in tokens.
        without: rules that are not checked.

    Raises:
        RuleBrokenError: the policy breaks a rule. It is an AssertionError. PluginError: no package
        could offer it. SpecError: it doesn't take the settings. ValueError: ``without`` names an
        unknown rule, or there is no turn to check.
    """
    for rule in without:
        if rule not in RULES:
            raise ValueError(f"no rule is called {rule!r}{did_you_mean(rule, RULES)}")
    tried = policy_of(policy, settings, name=name)
    played = synthetic_sessions() if sessions is None else sessions
    checker = _Checker(tried, render, window, frozenset(without))
    totals = Report(tried.name, len(played))
    for number, session in enumerate(played):
        totals = checker.session(number, session, totals)
    if not totals.turns:
        raise ValueError("there is no turn to check")
    if not totals.edited_turns:
        played_turns = f"{totals.turns} turns of {totals.sessions} sessions"
        warn(
            f"policy {tried.name!r} edited nothing on {played_turns}, so the rules for edits were "
            "not tried: give it sessions or settings with which it acts",
            NothingEditedWarning,
            stacklevel=2,
        )
    return totals


@dataclass(slots=True)
class _Player:
    """One run of a session: messages of its own, and the data kept from turn to turn."""

    policy: Policy
    window: int | None
    state: State = field(default_factory=dict)
    memo: Memo = field(default_factory=Memo)
    copies: dict[int, tuple[Message, Message]] = field(default_factory=dict)

    def own(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages as objects of this run, the same ones on every turn."""
        for message in messages:
            if id(message) not in self.copies:
                self.copies[id(message)] = (message, deepcopy(message))
        return [self.copies[id(message)][1] for message in messages]

    def context(self, turn: int, state: State, memo: Memo) -> Context:
        sleep = _LONG_SLEEP_S if turn % 5 == 4 else 2.0 * (turn > 0)
        name = self.policy.name
        return Context(
            turn, self.window, sleep, "test-model", state=state, memo=memo, policy=name, slot=name
        )

    def play(self, turn: int, messages: list[Message]) -> tuple[list[Message], Context]:
        """Play one turn. Raises what the policy raises."""
        self.memo.next_turn()
        context = self.context(turn, self.state, self.memo)
        returned = run(self.policy, messages, turn, context)
        self.state = context.state
        return returned, context


class _Checker:
    def __init__(
        self, policy: Policy, render: Render | None, window: int | None, without: frozenset[str]
    ) -> None:
        self._policy = policy
        self._render = render
        self._window = window
        self._without = without

    def session(self, number: int, session: Session, totals: Report) -> Report:
        """Check one session twice; returns the totals with its figures."""
        first = _Player(self._policy, self._window)
        results: list[list[Message]] = []
        for turn, request in enumerate(session):
            sent = self._turn(first, (number, turn), first.own(request))
            totals = _counted(totals, first.own(request), sent, results[-1] if results else [])
            results.append(deepcopy(sent))
        again = _Player(self._policy, self._window)
        for turn, request in enumerate(session):
            returned, _ = self._played(again, (number, turn), again.own(request))
            self._same("deterministic", (number, turn), results[turn], without_dropped(returned))
        return totals

    def _turn(self, player: _Player, place: tuple[int, int], given: list[Message]) -> list[Message]:
        """Play and check one turn; returns the messages to send."""
        before, state = deepcopy(given), deepcopy(player.state)
        handed = list(given)
        returned, context = self._played(player, place, handed)
        self._demand("input_kept", place, is_unchanged(before, handed))
        self._demand("input_kept", place, is_unchanged(before, given))
        self._demand("returns_messages", place, is_message_list(returned))
        call = Call(self._policy, given, returned, context)
        for rule, check in CHECKS.items():
            if rule not in self._without:
                self._demand(rule, place, check(call))
        self._repeat(player, place, before, state, call)
        self._rendered(place, before, call.after)
        return call.after

    def _repeat(
        self,
        player: _Player,
        place: tuple[int, int],
        before: list[Message],
        state: State,
        call: Call,
    ) -> None:
        """Repeat the call with the state from before on other objects, then once more."""
        fresh = player.context(place[1], state, Memo())
        self._same("idempotent", place, call.after, self._result(place, before, fresh))
        if fresh.state != call.context.state:
            self._demand("idempotent", place, Breach("it leaves another state"))
        # A request that is sent twice, and a forget that runs twice a turn, must not differ.
        retry = player.context(place[1], deepcopy(call.context.state), player.memo)
        self._same("idempotent", place, call.after, self._result(place, call.given, retry))

    def _played(
        self, player: _Player, place: tuple[int, int], messages: list[Message]
    ) -> tuple[list[Message], Context]:
        try:
            return player.play(place[1], messages)
        except Exception as error:
            raise self._broken("no_exception", place, _told(error)) from error

    def _result(
        self, place: tuple[int, int], messages: list[Message], context: Context
    ) -> list[Message]:
        try:
            return without_dropped(run(self._policy, list(messages), place[1], context))
        except Exception as error:
            raise self._broken("no_exception", place, _told(error)) from error

    def _rendered(
        self, place: tuple[int, int], before: list[Message], after: list[Message]
    ) -> None:
        if self._render is None or "renders" in self._without:
            return
        try:
            self._render(deepcopy(before))
        except Exception:  # a session that can't be rendered shows nothing about the policy
            return
        try:
            self._render(deepcopy(after))
        except Exception as error:
            raise self._broken("renders", place, _told(error)) from error

    def _same(
        self, rule: str, place: tuple[int, int], first: list[Message], second: list[Message]
    ) -> None:
        if first == second:
            return
        matcher = difflib.SequenceMatcher(
            None, [repr(m) for m in first], [repr(m) for m in second], autojunk=False
        )
        at = next((i for op, i, *_ in matcher.get_opcodes() if op != "equal"), None)
        told = f"{len(first)} messages, then {len(second)}, which differ"
        self._demand(rule, place, Breach(told, at))

    def _demand(self, rule: str, place: tuple[int, int], breach: Breach | None) -> None:
        if breach is not None and rule not in self._without:
            raise self._broken(rule, place, breach)

    def _broken(self, rule: str, place: tuple[int, int], breach: Breach) -> RuleBrokenError:
        return RuleBrokenError(self._policy.name, rule, place, breach.message, breach.detail)


def _counted(
    totals: Report, given: list[Message], sent: list[Message], last: list[Message]
) -> Report:
    count = Context().total
    return Report(
        totals.policy,
        totals.sessions,
        totals.turns + 1,
        totals.edited_turns + (sent != given),
        totals.rewrites + (sent[: len(last)] != last),
        totals.given_tokens + count(given),
        totals.sent_tokens + count(sent),
    )


def _told(error: Exception) -> Breach:
    return Breach(f"{type(error).__name__}: {error}")
