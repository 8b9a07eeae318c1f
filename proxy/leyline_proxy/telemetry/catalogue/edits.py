"""Edits, policies and the scheduler of edits."""

from __future__ import annotations

from typing import get_args

from ...model.vocabulary import Decision, ForgetResult
from .entries import CatalogueEntry, Group, counter

_EDITS: tuple[CatalogueEntry, ...] = (
    counter(
        "edits",
        "Edits by cause, mode and the reason in the receipt.",
        ("tenant", "cause", "mode", "outcome"),
    ),
    counter(
        "forgets",
        "Turns that demanded to forget something, by result. erased: everything that the forget "
        "reaches is overwritten; pending: running requests still hold some; owed: an engine has "
        "not confirmed it and is asked until it does; unreachable: text may be in a cache where no "
        "forget finds it, because the conversation had no name or the engine takes no forgets.",
        ("tenant", "result"),
        bad="'unreachable' above 0: name sessions in which secrets are redacted. 'owed' grows: "
        "see leyline_erasures_owed.",
        starts=tuple((result,) for result in get_args(ForgetResult)),
    ),
    counter(
        "schedule_decisions",
        "Decisions of the scheduler on edits that could wait. nothing: none could; untimed: they "
        "aren't made to save tokens, or cost nothing on this engine; pressure: the window is "
        "nearly full; pays: they reclaim enough to pay for the new prefill; held: they wait.",
        ("decision",),
        bad="'pressure' often: the window is too small for these sessions, or edits wait too long.",
        starts=tuple((decision.value,) for decision in Decision),
    ),
    counter(
        "policy_messages",
        "Messages that a policy edited or left out, counted on each turn, by policy.",
        ("policy", "mode"),
    ),
    counter(
        "policy_faults",
        "Policies that were skipped for one turn.",
        ("policy", "fault"),
        bad="Above 0: a policy breaks a rule or takes too long; the log names the rule.",
    ),
    counter(
        "policy_refusals",
        "Requests that weren't sent because a policy failed that removes content that must not "
        "reach the model.",
        ("policy", "fault"),
        bad="Above 0: clients get errors until the policy is fixed or its faults are skipped.",
    ),
    counter(
        "policy_reloads",
        "Changes of the policy file, loaded or refused.",
        ("result",),
        bad="'refused': the file is wrong, and the previous policies apply; the log shows where.",
        starts=(("loaded",), ("refused",)),
    ),
    counter(
        "policy_completions",
        "Texts that policies asked a model to write, written or failed.",
        ("result",),
        starts=(("written",), ("failed",)),
    ),
    counter(
        "policy_completion_tokens",
        "Tokens of policies' questions about a conversation, by source, and of the answers "
        "(generated). No other metric of turns or tokens has them.",
        ("source",),
        bad="prefilled above some hundreds per text: the question doesn't find its conversation "
        "in the cache.",
        starts=(("cached",), ("spliced",), ("reused",), ("prefilled",), ("generated",)),
    ),
    counter(
        "compactions",
        "Summaries that requests asked for in place of their conversation, written or failed.",
        ("result",),
        bad="'failed': these requests keep their whole conversation; the log gives the reason.",
        starts=(("written",), ("failed",)),
    ),
    counter(
        "policy_notes",
        "Reports of policies that don't edit: warnings, dry runs.",
        ("policy", "kind"),
    ),
)

GROUPS = (Group("Edits and policies", "Changes of prompts, and their timing.", _EDITS),)
