"""Run policies over a turn's messages, and check their inputs and results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from leyline_engine.contract import Mode
from leyline_policies import Context, EditCost, Memo, Note, Policy, approximate_tokens, run
from leyline_policies.alignment import align, identities, put_back
from leyline_policies.context import MAX_STATE_BYTES, Completion, State
from leyline_policies.conversation import with_partners
from leyline_policies.faults import OnFault, fails_closed
from leyline_policies.marks import MarkedMessage, without_dropped
from leyline_policies.policy import MODES
from leyline_policies.promises import forgets
from leyline_policies.verbs import ANNOTATION, Verbs, is_annotated, is_forgotten, pinned

from ..model.messages import Message, is_text_only
from ..model.prepared import Change, Fault, FaultOrigin, PolicyFault, Prepared, Quarantined
from .asides import unread_places
from .condemned import condemnations, newly_quarantined
from .edited import Sensitive
from .fault_origins import origin_of
from .stage import Stage, explain, find_fault

_CONTAINERS = (dict, list)
_NO_STATE = b"{}"
SAYS = "says"
"""Memo key for whether a message has an annotation."""

Transformed = list[Message]
Limit = Callable[[Callable[[], Transformed]], Transformed]


class PolicyTimeoutError(Exception):
    """A policy exceeded its time limit; ``frames`` are the calls that it was in."""

    def __init__(self, message: str, frames: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.frames = frames


class _FaultError(Exception):
    """A policy broke a rule."""

    def __init__(self, fault: Fault, origin: FaultOrigin | None = None) -> None:
        super().__init__(fault)
        self.fault = fault
        self.origin = origin


def _unlimited(call: Callable[[], Transformed]) -> Transformed:
    return call()


@dataclass(frozen=True, slots=True)
class PolicySession:
    """Facts of the session for policies, besides the messages, and the policies' states."""

    window: int | None = None
    """The model's context window in tokens."""
    idle_s: float = 0.0
    elapsed_s: float = 0.0
    model: str = ""
    cost: EditCost = field(default_factory=EditCost)
    states: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """:attr:`Prepared.states` of the session's last turn."""
    memo: Memo = field(default_factory=Memo)
    count: Callable[[Message], int] = approximate_tokens
    """Counts the tokens of a message."""
    limit: Limit = _unlimited
    """Calls an untrusted policy. Raises PolicyTimeoutError."""
    completions: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Texts that models have written for policies."""
    sensitive: Sensitive | None = None
    """Finds content whose removal is a forget, whatever the policy's mode."""
    on_fault: OnFault = "refuse"
    """Default action after a fault of a policy that forgets."""
    last: Prepared | None = field(default=None, repr=False)
    """The session's last turn."""
    only_forgets: bool = False
    """True to run only the policies that remove what must not reach the model."""


class PolicyRun:
    """One run of a pipeline.

    Args:
        checked: True to check trusted policies like all others.
        condemned: messages that are in quarantine already, by index in the client's list.
    """

    def __init__(
        self,
        session: PolicySession,
        turn_index: int,
        *,
        checked: bool,
        condemned: Mapping[int, Quarantined] | None = None,
    ) -> None:
        self._session = session
        self._turn = turn_index
        self._checked = checked
        self.condemned = condemned or {}
        self.quarantined: dict[int, Quarantined] = {}
        self.states: dict[str, State] = {}
        self.notes: list[Note] = []
        self.wanted: list[Completion] = []
        self.used: set[str] = set()
        self._forgetting: set[str] = set()
        """Slots of the pipeline whose policy forgets."""
        self._annotated = False
        """True if any message is known to have an annotation."""

    @property
    def memo(self) -> Memo:
        """The session's memo."""
        return self._session.memo

    def run_all(
        self, stage: Stage, policies: Sequence[Policy], client: Stage | None = None
    ) -> Stage:
        """Return the list after all policies.

        Args:
            client: the list as the client sent it, if ``stage`` has its declared edits.
        """
        client = client or stage
        slots = [
            (f"{place}.{policy.name}", policy)
            for place, policy in enumerate(policies)
            if getattr(policy, "edits", True)
        ]
        # A plugin's mode may differ each time it is read.
        self._forgetting = {slot for slot, policy in slots if _mode_of(policy) != "amortize"}
        known = self._condemn(stage)
        if stage is client:
            client = known  # nobody looks for more in text that is condemned
        stage = self._say(known)
        if stage is not client:
            stage = self._demanded(client, stage, slots)
        for slot, policy in slots:
            if slot in self._forgetting and stage.refused is None:
                stage = self._apply(stage, slot, policy)
        searched = stage
        for slot, policy in () if self._session.only_forgets else slots:
            if stage.refused is not None:
                break
            if slot not in self._forgetting:
                stage = self._apply(stage, slot, policy)
            elif stage is not searched:
                # It made its demands when it saw the client's text.
                done = self._apply(stage, slot, policy)
                if done is not stage:
                    stage = replace(done, demands={**done.demands, **stage.demands})
        return stage

    def apply(self, stage: Stage, policy: Policy) -> Stage:
        """Return the list after one more policy, which is the proxy's own."""
        return self._apply(stage, f"own.{policy.name}", policy)

    def _demanded(self, client: Stage, stage: Stage, slots: Sequence[tuple[str, Policy]]) -> Stage:
        """Return the list with the policies' forget demands on the client's own messages. Callers
        may remove, perhaps to amortize, content that policies look for."""
        looking = PolicyRun(
            self._session, self._turn, checked=self._checked, condemned=self.condemned
        )
        looking._forgetting = {f"client, {slot}" for slot in self._forgetting}
        seen = looking._condemn(client)
        for slot, policy in slots:
            if slot in self._forgetting and seen.refused is None:
                seen = looking._apply(seen, f"client, {slot}", policy)
        if seen.refused is not None:
            faults = (*stage.faults, *seen.faults)
            return replace(stage, faults=faults, refused=stage.refused or seen.refused)
        self.quarantined = {**looking.quarantined, **self.quarantined}
        return replace(stage, demands={**seen.demands, **stage.demands})

    def _condemn(self, stage: Stage) -> Stage:
        """Apply the verdicts of earlier turns."""
        for policy in condemnations(stage, self.condemned):
            stage = self._apply(stage, f"condemned.{policy.name}", policy)
        return stage

    def _say(self, stage: Stage, slot: str = "verbs") -> Stage:
        """Apply the messages' annotations."""
        self._annotated = self._annotates(stage, slot)
        if not self._annotated:
            return stage
        return self._apply(stage, slot, Verbs(any(map(is_forgotten, stage.messages))))

    def _apply(self, stage: Stage, slot: str, policy: Policy) -> Stage:
        """Return the list after a policy, and after its annotations of messages."""
        name = policy.name
        try:
            given, after = self._transformed(stage, slot, policy)
        except _FaultError as error:
            found = PolicyFault(name, error.fault, error.origin)
        except Exception as error:  # a policy is a plugin; its errors cost only its own edits
            found = PolicyFault(name, "raised", origin_of(error))
        else:
            if after is given:
                return stage
            change = Change(f"policy:{name}", Mode(policy.mode))
            try:
                sensitive = self._session.sensitive
                # Copies are others on each turn, so remembering them would only cost memory.
                memo = self._session.memo if given is stage.messages else None
                done = explain(stage, given, after, change, sensitive, memo=memo)
            except Exception as error:  # only a trusted policy returns an unchecked list
                fault = find_fault(given, after) or "raised"
                return self._failed(stage, slot, policy, PolicyFault(name, fault, origin_of(error)))
            if done.sent == stage.sent:
                return stage
            self.quarantined.update(newly_quarantined(stage, done))
            if self._annotates(done, f"{slot}.verbs") and _annotated(given, after):
                return self._say(done, f"{slot}.verbs")
            return done
        if slot not in self.states and slot in self._session.states:
            self.states[slot] = dict(self._session.states[slot])
        return self._failed(stage, slot, policy, found)

    def _failed(self, stage: Stage, slot: str, policy: Policy, found: PolicyFault) -> Stage:
        """Return the same list with the policy's fault."""
        last = self._session.last
        # Whatever its mode: content that it took out of the last turn must not come back.
        forgot = slot in self._forgetting or (
            last is not None and (policy.name, "forget") in last.changes_of_policies()
        )
        refuses = fails_closed(policy, self._session.on_fault, forgot=forgot)
        return stage.fault(found, refuses=refuses)

    def _annotates(self, done: Stage, slot: str) -> bool:
        """Return True if a message of the list after a policy has an annotation."""
        return self._session.memo.any(done.messages, SAYS, is_annotated, slot)

    def _transformed(
        self, stage: Stage, slot: str, policy: Policy
    ) -> tuple[list[Message], list[Message]]:
        """Return the policy's input and its result.

        Raises:
            _FaultError: the policy broke a rule.
        """
        if policy.mode not in MODES:
            raise _FaultError("bad_type")
        context, given, checked = self._context(slot, policy.name), stage.messages, self._checked
        trusted = getattr(policy, "trusted", False)
        if trusted:
            self._session.memo.settle(given)
            after = run(policy, given, self._turn, context)
        else:
            given, checked = [*map(_copy, given)], True
            after = self._limited(policy, given, context)
            if given != stage.messages:
                raise _FaultError("mutated")
        self._keep(slot, context)
        if policy.mode != "forget" and after is not given and _is_list(after):
            kept = _held_back(given, after, context) if self._annotated else set()
            kept |= set(unread_places(stage.sent))
            after = put_back(given, after, kept) if kept else after
        if checked and after is not given:
            fault = find_fault(given, without_dropped(after) if _is_list(after) else after)
            if fault is not None:
                raise _FaultError(fault)
        return given, after if trusted else _owned(given, after)

    def _limited(self, policy: Policy, given: list[Message], context: Context) -> list[Message]:
        # The policy gets its own list, so that its input stays available for comparison.
        handed = list(given)
        try:
            return self._session.limit(lambda: run(policy, handed, self._turn, context))
        except PolicyTimeoutError as error:
            origin = FaultOrigin("timeout", error.frames) if error.frames else None
            raise _FaultError("timed_out", origin) from error
        except (GeneratorExit, SystemExit) as error:
            raise _FaultError("raised", origin_of(error)) from error

    def _context(self, slot: str, name: str) -> Context:
        session, again = self._session, slot in self.states
        # A policy's second run of a turn leaves no state: the first was on the client's text.
        left = (self.states if again else session.states).get(slot)
        state = deepcopy(dict(left)) if left else {}
        return Context(
            turn=self._turn,
            window=session.window,
            idle_s=session.idle_s,
            elapsed_s=session.elapsed_s,
            model=session.model,
            cost=session.cost,
            state=state,
            count=session.count,
            memo=session.memo,
            policy=name,
            slot=slot,
            rerun=again,
            completions=session.completions,
        )

    def _keep(self, slot: str, context: Context) -> None:
        """Keep the state and notes of a policy's first run of the turn.

        Raises:
            _FaultError: the state isn't JSON or is too large, or a note has more than numbers.
        """
        if slot in self.states:
            return
        try:
            encoded = msgspec.json.encode(context.state) if context.state else _NO_STATE
        except (TypeError, ValueError, RecursionError) as error:
            raise _FaultError("bad_state") from error
        if len(encoded) > MAX_STATE_BYTES or not all(map(_holds_numbers, context.notes)):
            raise _FaultError("bad_state")
        self.states[slot] = msgspec.json.decode(encoded) if encoded is not _NO_STATE else {}
        self.notes += context.notes
        self.wanted += context.wanted
        self.used |= context.used


def _mode_of(policy: Policy) -> object:
    try:
        return policy.mode
    except Exception:  # the mode is read again later, with faults caught
        return None


def _holds_numbers(note: Note) -> bool:
    return all(isinstance(value, int | float) for value in note.values.values())


def _annotated(given: Sequence[Message], after: Sequence[Message]) -> bool:
    """Return True if a policy may have annotated a message."""
    known = set(map(id, given))
    return any(ANNOTATION in message and id(message) not in known for message in after)


def _held_back(given: list[Message], after: list[Message], context: Context) -> set[int]:
    """Return the pinned messages that aren't to be forgotten."""
    calls, known = context.calls(given), set(map(id, given))
    kept = with_partners(pinned(given), calls)
    told = {i for i, message in enumerate(after) if forgets(message, known)} if kept else set()
    if not told:
        return kept
    spared = {each for index in told for each in identities(after[index])}
    gone = {index for index, message in enumerate(given) if id(message) in spared}
    gone |= {old for old, new in align(given, after) if new in told}
    return kept - with_partners(gone, calls)


def _owned(given: list[Message], after: list[Message]) -> list[Message]:
    """Return ``after`` with copies of messages that the policy may keep and change later."""
    known = set(map(id, given))
    result: list[Message] = []
    for message in after:
        if id(message) in known:
            result.append(message)
        elif isinstance(message, MarkedMessage):
            result.append(MarkedMessage(_copy(message), message.origin, message.mark))
        else:
            result.append(_copy(message))
    return result


def _is_list(after: object) -> bool:
    return isinstance(after, list) and all(isinstance(message, dict) for message in after)


def _copy(message: Message) -> Message:
    """Return a copy of a message that a policy may change freely."""
    copied: Message = dict(message) if is_text_only(message) else clone(message)
    return copied


def clone(value: Any) -> Any:
    """Return a deep copy of JSON-shaped data."""
    if isinstance(value, dict):
        return {
            key: clone(item) if isinstance(item, _CONTAINERS) else item
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [clone(item) if isinstance(item, _CONTAINERS) else item for item in value]
    return value
