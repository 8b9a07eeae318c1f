"""Whose faults refuse a request: of which policies it is known beforehand that they may forget."""

from __future__ import annotations

from typing import Any

import pytest
from support.builtin_specs import SPECS

from leyline_policies import Context, Message, Policy, SpecError, function_policy, load_pipeline
from leyline_policies.builtin import BUILTINS
from leyline_policies.builtin.keep_all import KeepAll
from leyline_policies.compose import Chosen, dry_run, pipeline, protect, when
from leyline_policies.faults import fails_closed, may_forget
from leyline_policies.triggers import turns

(REDACT,) = load_pipeline("redact:pattern=x")
TIDY = KeepAll()


class Odd:
    """A policy that says of its mode whatever it is given."""

    name = "odd"

    def __init__(self, mode: Any, **more: Any) -> None:
        self._mode = mode
        vars(self).update(more)

    @property
    def mode(self) -> Any:
        if isinstance(self._mode, Exception):
            raise self._mode
        return self._mode

    def transform(self, messages: list[Message], turn_idx: int) -> list[Message]:
        return messages


@function_policy(forgets=True)
def mixed(messages: list[Message], turn_idx: int) -> list[Message]:
    """Mark some edits as forget."""
    return messages


@pytest.mark.parametrize(
    ("policy", "closed"),
    [
        (REDACT, True),
        (TIDY, False),
        (mixed, True),
        (protect(REDACT, keep_last=1), True),
        (pipeline(TIDY, protect(REDACT, keep_first=1)), True),
        (pipeline(TIDY, mixed), True),
        (pipeline(TIDY, TIDY), False),
        (when(turns(1), TIDY), False),
        (dry_run(REDACT), False),
        (pipeline(TIDY, dry_run(REDACT)), False),
        (when(turns(1), dry_run(REDACT)), False),
        (pipeline(dry_run(TIDY), REDACT), True),
        (Odd("amortize"), False),
        (Odd("forget"), True),
        (Odd("erase"), True),
        (Odd(None), True),
        (Odd(RuntimeError()), True),
        (Odd("amortize", forgets=True), True),
        (Chosen(REDACT, "skip"), False),
        (Chosen(TIDY, "refuse"), True),
        (dry_run(Chosen(TIDY, "refuse")), False),
        (protect(Chosen(REDACT, "skip"), keep_last=1), False),
        (pipeline(Chosen(REDACT, "skip"), TIDY), False),
        (pipeline(Chosen(REDACT, "skip"), REDACT), True),
        (pipeline(REDACT, Chosen(TIDY, "refuse")), True),
        (pipeline(Chosen(TIDY, "skip"), REDACT), True),
        (pipeline(Chosen(REDACT, "skip"), Chosen(TIDY, "refuse")), True),
    ],
)
def test_a_policy_that_may_forget_fails_closed(policy: Policy, closed: bool) -> None:
    """It does so inside others, too, and where it can't say what it does; a dry run never does."""
    assert fails_closed(policy, "refuse") is closed


@pytest.mark.parametrize(
    ("policy", "closed"),
    [(REDACT, False), (Chosen(REDACT, "refuse"), True), (pipeline(REDACT, mixed), False)],
)
def test_the_operator_may_choose_otherwise(policy: Policy, closed: bool) -> None:
    """The choice holds for policies for which none was made."""
    assert fails_closed(policy, "skip") is closed


def test_what_forgot_before_counts_as_forgetting() -> None:
    """It does whatever it says of itself, unless its faults were chosen to be skipped."""
    assert fails_closed(TIDY, "refuse", forgot=True)
    assert not fails_closed(TIDY, "skip", forgot=True)
    assert not fails_closed(dry_run(REDACT), "refuse", forgot=True)


def test_what_ships_says_what_it_does() -> None:
    """redact and quarantine may forget, and no other."""
    found = set()
    for name in BUILTINS:
        (policy,) = load_pipeline(SPECS[name][0])
        found |= {name} if may_forget(policy) else set()
    assert found == {"redact", "quarantine"}


def test_the_choice_is_a_setting_of_every_policy() -> None:
    """It is set like other settings; an unknown value is refused, and a policy that forgets doesn't
    wait."""
    (skipped,) = load_pipeline("redact:pattern=x,on_fault=skip,protect_last=1")
    assert (skipped.name, skipped.mode) == ("redact", "forget")
    assert not fails_closed(skipped, "refuse")
    (strict,) = load_pipeline("truncate_older_than:n=1,every=2,on_fault=refuse")
    assert fails_closed(strict, "skip")
    messages: list[Message] = [{"role": "user", "content": "x"}]
    assert skipped.transform(messages, 0, Context()) == messages
    with pytest.raises(SpecError, match="on_fault='never' is not one of refuse, skip"):
        load_pipeline("redact:pattern=x,on_fault=never")
    with pytest.raises(ValueError, match="mixed forgets, and that never waits"):
        when(turns(1), mixed)
