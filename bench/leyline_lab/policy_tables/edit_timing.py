"""The proxy's scheduler of edits against fixed rules, in tokens prefilled.

Recorded sessions are replayed turn by turn with a policy. Every strategy decides on each turn if
the waiting edits are sent; the prefilled tokens then are those of a prefix cache (all after the
first difference to the turn before) or of a splicing engine (new or rewritten tokens). No strategy
may let the prompt outgrow the window: beyond the pressure all commit.

Settings are tuned on every other session and the rest is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leyline_policies import EditCost, Memo, Policy, approximate_tokens, load_pipeline
from leyline_proxy.edits.prepare import PolicySession, prepare
from leyline_proxy.edits.schedule import Balance, Timing, balance, pays, pending
from leyline_proxy.model.messages import Message
from leyline_proxy.model.prepared import Prepared

from ..console import write_json
from ..harness.arguments import Arguments, numbers
from ..harness.report import progress, show
from ..traces.recordings import RecordedSession, read_trace

PRESSURE = 0.8
PLAIN = EditCost(splices=False, prefill_us=1.0)
SPLICING = EditCost(splices=True, prefill_us=1.0, splice_us=0.02)
ENGINES = {"plain": PLAIN, "splicing": SPLICING}
CARRIES = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
NEEDS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
SCHEDULER = "scheduler"


@dataclass(frozen=True, slots=True)
class Moment:
    """A strategy's input when it decides."""

    found: Balance
    turn: int
    since: int
    """Number of turns since it committed last."""
    cost: EditCost
    window: int


Strategy = Callable[[Moment], bool]


def scheduled(timing: Timing) -> Strategy:
    """Return the proxy's own rule."""
    return lambda now: pays(now.found, now.cost, timing, turns=now.turn, window=now.window)


def fixed_strategies() -> dict[str, Strategy]:
    """Return rules with one fixed number each; ``never`` commits only when it must."""

    def reclaims(tokens: int) -> Strategy:
        return lambda now: now.found.reclaimed >= tokens

    def fills(share: float) -> Strategy:
        return lambda now: now.found.prompt > share * now.window

    def every(turns: int) -> Strategy:
        return lambda now: now.since >= turns

    return {
        "never": lambda now: False,
        "every turn": lambda now: True,
        **{f"every {n} turns": every(n) for n in (2, 5, 10, 20)},
        **{f"reclaims {n}": reclaims(n) for n in (500, 1_000, 2_000, 5_000, 10_000, 20_000)},
        **{f"fills {share:.0%}": fills(share) for share in (0.2, 0.4, 0.6)},
    }


@dataclass(frozen=True, slots=True)
class Turns:
    """A session's turns with all edits made, ready for any strategy."""

    prepared: tuple[Prepared, ...]
    memo: Memo

    def tokens(self, message: Message) -> int:
        """Return the tokens of one message, counted once."""
        return self.memo.get(message, "tokens", approximate_tokens)


def turns_of(session: RecordedSession, policies: Sequence[Policy]) -> Turns:
    """Return the policies' edits of each request."""
    memo = Memo()
    states: dict[str, dict[str, Any]] = {}
    made: list[Prepared] = []
    for index, request in enumerate(session.requests):
        facts = PolicySession(states=states, memo=memo)
        made.append(prepare(request.messages, policies, (), index, session=facts))
        states = {slot: dict(state) for slot, state in made[-1].states.items()}
    return Turns(tuple(made), memo)


def prefilled(turns: Turns, strategy: Strategy, cost: EditCost, window: int) -> int:
    """Return the prompt tokens that the engine computes over the session."""
    total, since, sent = 0, 0, None
    for index, now in enumerate(turns.prepared):
        chosen, since = now, since + 1
        if sent is not None and (held := pending(sent, now)) is not None:
            found = balance(held, now, len(sent.sent), turns.tokens)
            forced = found.prompt > PRESSURE * window
            if forced or strategy(Moment(found, index, since, cost, window)):
                since = 0
            else:
                chosen = held
        total += computed(sent, chosen, cost, turns.tokens)
        sent = chosen
    return total


def computed(
    last: Prepared | None, now: Prepared, cost: EditCost, tokens: Callable[[Message], int]
) -> int:
    """Return the tokens of a turn's prompt that aren't in the cache; the last answer is."""
    messages = now.messages
    if last is None:
        return sum(map(tokens, messages))
    before = last.messages
    same = 0
    while same < min(len(before), len(messages)) and before[same] == messages[same]:
        same += 1
    after = messages[same:]
    if same == len(before):  # nothing was edited
        return sum(tokens(message) for message in after[1:])
    if not cost.splices:
        return sum(map(tokens, after))
    known = {id(message) for message in before}
    return sum(
        tokens(message)
        for message in after
        if id(message) not in known and message.get("role") != "assistant"
    )


def halves(sessions: Sequence[Turns]) -> tuple[list[Turns], list[Turns]]:
    """Return every other session for tuning, and the rest for the report."""
    return list(sessions[::2]), list(sessions[1::2])


def summed(sessions: Sequence[Turns], strategy: Strategy, cost: EditCost, window: int) -> int:
    """Return the prefilled tokens of several sessions."""
    return sum(prefilled(turns, strategy, cost, window) for turns in sessions)


def tuned(sets: Mapping[str, Sequence[Turns]], cost: EditCost, windows: Sequence[int]) -> Timing:
    """Return the scheduler's setting with the fewest prefilled tokens on the tuning halves."""

    def loss(timing: Timing) -> float:
        # Relative to each set's own least, so that long sessions don't decide alone.
        return sum(
            summed(halves(turns)[0], scheduled(timing), cost, window)
            / max(1, summed(halves(turns)[0], fixed_strategies()["never"], cost, window))
            for turns in sets.values()
            for window in windows
        )

    settings = [
        Timing(carry=carry, need=need, pressure=PRESSURE) for carry in CARRIES for need in NEEDS
    ]
    with progress("tuning", len(settings)) as step:
        losses: dict[Timing, float] = {}
        for timing in settings:
            losses[timing] = loss(timing)
            step()
    return min(losses, key=losses.__getitem__)


def compare(
    sets: Mapping[str, Sequence[Turns]], windows: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield one row per engine, set and window."""
    for engine, cost in ENGINES.items():
        timing = tuned(sets, cost, windows)
        for name, turns in sets.items():
            rest = halves(turns)[1]
            for window in windows:
                fixed = {
                    rule: summed(rest, strategy, cost, window)
                    for rule, strategy in fixed_strategies().items()
                }
                own = summed(rest, scheduled(timing), cost, window)
                best = min(fixed, key=fixed.__getitem__)
                yield {
                    "engine": engine,
                    "set": name,
                    "window": window,
                    "carry": timing.carry,
                    "need": timing.need,
                    SCHEDULER: own,
                    "fixed": fixed,
                    "best_fixed": best,
                    "ratio": own / fixed[best] if fixed[best] else 1.0,
                }


def main() -> None:
    """Replay, print, write."""
    parser = Arguments(__doc__)
    parser.add_argument("traces", nargs="+", type=Path, help="recorded sessions, .jsonl(.gz)")
    parser.add_argument("--policy", default="truncate_older_than", help="what edits")
    parser.add_argument("--windows", type=numbers, default="16000,32000,128000", help="in tokens")
    given = parser.parse_args()
    policies = load_pipeline(given.policy)
    sets: dict[str, list[Turns]] = {}
    with progress("policies", len(given.traces)) as step:
        for path in given.traces:
            turns = [turns_of(session, policies) for session in read_trace(path).sessions]
            sets[path.name.partition(".")[0]] = turns
            step()
    found = list(compare(sets, given.windows))
    names = ("engine", "set", "window", "carry", "need", SCHEDULER)
    rows = [
        (
            *(each[name] for name in names),
            f"{each['best_fixed']}: {each['fixed'][each['best_fixed']]}",
            f"{each['ratio']:.3f}",
        )
        for each in found
    ]
    show((*names[:-1], "prefilled", "best fixed rule", "ratio"), rows, words=2)
    write_json(given.json, found)
