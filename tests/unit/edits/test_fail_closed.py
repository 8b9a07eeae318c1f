"""A policy that forgets and fails: nothing may be sent."""

from __future__ import annotations

from typing import Any

import pytest
from plugin_kit import TALK, Plugin, at, run, said

from leyline_policies import Context, Memo, Message, drop, edit
from leyline_policies.compose import Chosen, dry_run, pipeline
from leyline_policies.verbs import forget
from leyline_proxy.edits.prepare import PolicySession, PolicyTimeoutError
from leyline_proxy.model.prepared import PolicyFault


def _raise(messages: list[Message], context: Context) -> Any:
    raise RuntimeError("secret words")


def _mutate(messages: list[Message], context: Context) -> Any:
    messages[1]["content"] = "changed in place"
    return messages


def _fill(messages: list[Message], context: Context) -> Any:
    context.state["text"] = "x" * 20_000
    return messages[:]


FAULTS: list[tuple[Any, str]] = [
    (_raise, "raised"),
    (_mutate, "mutated"),
    (_fill, "bad_state"),
    (lambda ms, _: None, "bad_type"),
    (lambda ms, _: [*ms, 3], "bad_type"),
    (lambda ms, _: [{"role": "wizard", "content": "x"}, *ms], "bad_message"),
    (lambda ms, _: [m for m in ms if m["role"] != "tool"], "broken_pair"),
    (lambda ms, _: ms[:-1], "lost_last_user"),
]


@pytest.mark.parametrize(("function", "fault"), FAULTS)
def test_no_fault_of_a_policy_that_forgets_lets_a_request_pass(function: Any, fault: str) -> None:
    """Alone, in a pipeline and around; the first fault is named, and no other policy is asked."""
    seen: list[str] = []

    def look(messages: list[Message], context: Context) -> Any:
        seen.append("asked")
        return messages

    bad = Plugin(function, "bad", mode="forget")
    refused = run(Plugin(look, "tidy"), bad, Plugin(look, "later", mode="forget"))
    assert refused.refused == PolicyFault("bad", fault)  # type: ignore[arg-type]
    assert refused.faults == (refused.refused,)
    assert seen == []
    joined = run(pipeline(Plugin(look, "tidy"), bad, name="both"))
    assert joined.refused is not None
    assert joined.refused.policy == "both"


@pytest.mark.parametrize(("function", "fault"), FAULTS)
def test_other_faults_are_skipped_as_before(function: Any, fault: str) -> None:
    """They are faults of a policy that tidies up, of one whose faults are to be skipped, and of a
    dry run."""
    skips = PolicySession(on_fault="skip")
    bad = Plugin(function, "bad", mode="forget")
    for policy, session in (
        (Plugin(function, "bad"), None),
        (bad, skips),
        (Chosen(bad, "skip"), None),
        (dry_run(Plugin(_raise, "bad", mode="forget")), None),
    ):
        prepared = run(policy, session=session)
        assert [f.policy for f in prepared.faults] == ["bad"]
        assert prepared.refused is None
        assert prepared.messages == TALK
    chosen = run(Chosen(Plugin(function, "bad"), "refuse"), session=skips)
    assert chosen.refused == PolicyFault("bad", fault)  # type: ignore[arg-type]


@pytest.mark.parametrize("trusted", [True, False])
def test_a_trusted_policy_is_checked_before_it_is_believed(trusted: bool) -> None:
    """A fault found only once all have run refuses the request, too."""
    bad = Plugin(lambda ms, _: ms[:-1], "bad", mode="forget", trusted=trusted)
    assert run(bad).refused == PolicyFault("bad", "lost_last_user")


def test_what_takes_too_long_is_refused() -> None:
    """So is a call when too many others hang to try it."""

    def never(call: Any) -> Any:
        raise PolicyTimeoutError("the call takes too long")

    prepared = run(Plugin(_raise, mode="forget"), session=PolicySession(limit=never))
    assert prepared.refused == PolicyFault("plugin", "timed_out")


def test_its_second_look_counts_as_much_as_its_first() -> None:
    """Another policy's text may hold what it looks for."""

    def once(messages: list[Message], context: Context) -> Any:
        if "new" in str(messages):
            raise RuntimeError
        return messages

    writes = Plugin(at(1, lambda m: edit(m, content="new")), "writes")
    assert run(writes, Plugin(once, "bad", mode="forget")).refused == PolicyFault("bad", "raised")


class Unsteady(Plugin):
    """A policy whose mode is another each time that it is asked."""

    modes = iter(())

    def __init__(self, *modes: Any) -> None:
        super().__init__(_raise, "unsteady")
        self._modes = list(modes)

    def __getattribute__(self, name: str) -> Any:
        if name == "mode" and (modes := super().__getattribute__("__dict__").get("_modes")):
            mode = modes.pop(0)
            if isinstance(mode, Exception):
                raise mode
            return mode
        return super().__getattribute__(name)


@pytest.mark.parametrize(
    "modes",
    [["forget", "erase"], [RuntimeError(), RuntimeError(), RuntimeError()], ["erase"] * 9],
)
def test_a_mode_that_cannot_be_told_is_a_forget(modes: list[Any]) -> None:
    """A plugin that says no mode, or fails to, is taken at its worst."""
    assert run(Unsteady(*modes)).refused is not None


@pytest.mark.parametrize(
    "change", [lambda m: edit(m, stub="[]", mode="forget"), lambda m: drop(m, mode="forget")]
)
def test_what_a_policy_made_this_session_forget_does_not_come_back(change: Any) -> None:
    """The policy's own claims don't matter: one that tidied up and marked a forget may not fail on
    the next turn, and one that marked none may."""
    fails = False

    def marks(messages: list[Message], context: Context) -> Any:
        if fails:
            raise RuntimeError
        return at(1, change)(messages, context)

    policy, tidy = Plugin(marks, "marks"), Plugin(_raise, "tidy")
    first = run(policy, tidy)
    fails = True
    assert (first.refused, [f.policy for f in first.faults]) == (None, ["tidy"])
    session = PolicySession(memo=Memo(), last=first)
    assert run(policy, tidy, session=session).refused == PolicyFault("marks", "raised")
    assert run(tidy, session=session).refused is None


@pytest.mark.parametrize("by_policy", [False, True])
def test_a_verb_that_forgets_is_carried_out_or_nothing_is_sent(by_policy: bool) -> None:
    """A list of which nothing would be left is no conversation, and isn't sent as it was; with
    evict it is, and no setting takes a demand back."""
    client: list[Message] = [{"role": "system", "content": "the key is hunter2"}]
    session = PolicySession(on_fault="skip")
    if by_policy:
        prepared = run(Plugin(at(0, forget)), client=client, session=session)
    else:
        noted = [client[0] | {"leyline": {"forget": True}}]
        prepared = run(client=noted, session=session)
        assert run(client=[client[0] | {"leyline": {"evict": True}}]).refused is None
    assert prepared.refused == PolicyFault("verbs", "bad_message")
    assert run(client=said(1, forget=True)).refused is None


def test_only_what_forgets_runs_where_nothing_else_is_asked() -> None:
    """Each in its place, with the state that it left there."""
    tidy = Plugin(at(4, lambda m: edit(m, content="short")), "tidy")

    def count(messages: list[Message], context: Context) -> Any:
        context.state["n"] = context.state.get("n", 0) + 1
        return at(1, lambda m: edit(m, content=f"seen {context.state['n']}"))(messages, context)

    both = (tidy, Plugin(count, "counts", mode="forget"))
    states = run(*both).states
    alone = run(*both, session=PolicySession(states=states, only_forgets=True))
    assert [m["content"] for m in alone.messages][1] == "seen 2"
    assert alone.messages[4] == TALK[4]
