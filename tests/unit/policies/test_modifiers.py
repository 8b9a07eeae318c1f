"""Settings that every policy takes."""

from __future__ import annotations

import pytest

from leyline_policies import Context, Message, SpecError, load_pipeline
from leyline_policies.builtin.drop_failed_calls import DropFailedCalls
from leyline_policies.builtin.keep_all import KeepAll
from leyline_policies.compose import DryRun, Gated, Protected
from leyline_policies.context import apply
from leyline_policies.modifiers import MODIFIERS, Modifiers


def _talk(results: int) -> list[Message]:
    talk: list[Message] = [{"role": "user", "content": "go"}]
    for number in range(results):
        body = {"name": "bash", "arguments": "{}"}
        call = {"id": f"c{number}", "type": "function", "function": body}
        talk += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{number}", "content": "x" * 400},
        ]
    return talk


def test_defaults_wrap_nothing() -> None:
    """A policy without such settings is the policy itself, and so is one with the defaults."""
    policy = KeepAll()
    assert Modifiers().around(policy) is policy
    spec = "keep_all:when='',every=1,at_least=0,protect_first=0,protect_roles=[],dry_run=false"
    assert load_pipeline(spec) == (policy,)


def test_wrappers_lie_around_each_other_in_one_order() -> None:
    """Protection is innermost, then the conditions together, and the dry run around all."""
    (policy,) = load_pipeline(
        "drop_failed_calls:dry_run=true,when='tokens > 5',at_least=10,protect_last=2"
    )
    assert isinstance(policy, DryRun)
    assert isinstance(policy.policy, Gated)
    protected = policy.policy.policy
    assert isinstance(protected, Protected)
    assert (protected.policy, protected.keep_last) == (DropFailedCalls(), 2)
    assert (policy.name, policy.mode) == ("drop_failed_calls", "amortize")


@pytest.mark.parametrize(
    ("settings", "shortened"),
    [
        ("protect_tools=[bash]", 0),
        ("protect_tools=[other]", 4),
        ("protect_roles=[tool]", 0),
        ("protect_last=4", 2),
        ("protect_first=3", 3),
        ("when='tool_uses > 3'", 4),
        ("when='tool_uses > 4'", 0),
        ("at_least=100", 4),
        ("at_least=100000", 0),
        ("dry_run=yes", 0),
    ],
)
def test_settings_hold(settings: str, shortened: int) -> None:
    """Each setting leaves alone what it says, and the list keeps its length."""
    (policy,) = load_pipeline(f"truncate_older_than:n=0,max_chars=100,{settings}")
    talk = _talk(4)
    after = apply(policy, talk, 0, Context())
    assert len(after) == len(talk)
    assert sum(old is not new for old, new in zip(talk, after, strict=True)) == shortened


@pytest.mark.parametrize(
    ("settings", "fragments"),
    [
        ("when='toks > 1'", ["keep_all: when: ", "did you mean 'tokens'"]),
        ("every=0", ["every=0", "1 turn or more"]),
        ("at_least=-1", ["at_least=-1 is negative"]),
        ("protect_first=-1", ["protect_first=-1 is negative"]),
        ("protect_last=-2", ["protect_last=-2 is negative"]),
        ("protect_roles=[tools]", ["protect_roles: 'tools'", "did you mean 'tool'"]),
        ("dry_run=perhaps", ["dry_run='perhaps' is not true or false"]),
        ("protect_rolls=[tool]", ["did you mean 'protect_roles'"]),
    ],
)
def test_mistake_names_key_and_fix(settings: str, fragments: list[str]) -> None:
    """A setting that can't be meant is refused with its name."""
    with pytest.raises(SpecError) as caught:
        load_pipeline(f"keep_all:{settings}")
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_every_setting_says_what_it_is_for() -> None:
    """Each of the settings has a sentence for the lists that people read, and a default."""
    assert all(each.help and not each.required for each in MODIFIERS)
