"""Edits, policies and the scheduler of edits."""

from __future__ import annotations

from typing import get_args

from ...core.forgetting import ForgetResult
from ...core.schedule import Decision
from .entries import Entry, Group, counter

_EDITS: tuple[Entry, ...] = (
    counter(
        "edits",
        "leyline_edits",
        "Edits by cause, mode and the reason in the receipt.",
        ("tenant", "cause", "mode", "outcome"),
    ),
    counter(
        "forgets",
        "leyline_forgets",
        "Turns that demanded to forget something, by what came of it. erased: all that it reaches "
        "is overwritten; pending: running requests still hold some; owed: an engine has not "
        "confirmed it and is asked until it does; unreachable: text may lie in a cache where no "
        "forget finds it, because the conversation had no name, or the engine takes no forgets.",
        ("tenant", "result"),
        bad="'unreachable' above 0: name sessions where secrets are redacted. 'owed' that grows: "
        "see leyline_erasures_owed.",
        starts=tuple((result,) for result in get_args(ForgetResult)),
    ),
    counter(
        "schedule_decisions",
        "leyline_schedule_decisions",
        "What the scheduler decided of edits that could wait. nothing: none could; untimed: they "
        "aren't made for their tokens, or cost nothing on this engine; pressure: the window is "
        "nearly full; pays: what they reclaim pays for what is computed anew; held: they wait.",
        ("decision",),
        bad="'pressure' often: the window is too small for these sessions, or edits wait too long.",
        starts=tuple((decision.value,) for decision in Decision),
    ),
    counter(
        "policy_messages",
        "leyline_policy_messages",
        "Messages that went out edited or were left out, on each turn, by policy.",
        ("policy", "mode"),
    ),
    counter(
        "policy_faults",
        "leyline_policy_faults",
        "Policies that were skipped for one turn.",
        ("policy", "fault"),
        bad="Above 0: a policy breaks a rule or takes too long; the log names the rule.",
    ),
    counter(
        "policy_refusals",
        "leyline_policy_refusals",
        "Requests that weren't sent, because a policy failed that takes out what must not reach "
        "the model.",
        ("policy", "fault"),
        bad="Above 0: clients get errors until the policy is fixed or its faults are skipped.",
    ),
    counter(
        "policy_reloads",
        "leyline_policy_reloads",
        "Changes of the policy file, by whether it was loaded or refused.",
        ("result",),
        bad="'refused': the file is wrong, and the policies of before hold; the log says where.",
        starts=(("loaded",), ("refused",)),
    ),
    counter(
        "policy_completions",
        "leyline_policy_completions",
        "Texts that policies had a model write, by whether it did.",
        ("result",),
        starts=(("written",), ("failed",)),
    ),
    counter(
        "policy_notes",
        "leyline_policy_notes",
        "What policies reported without editing: warnings, dry runs.",
        ("policy", "kind"),
    ),
)

GROUPS = (Group("Edits and policies", "Who changes prompts, and when.", _EDITS),)
