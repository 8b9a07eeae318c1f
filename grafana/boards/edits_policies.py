"""Edits by source and mode, and the policies' work."""

from __future__ import annotations

from frame import frame
from grafana_foundation_sdk.builders import dashboard
from panels import Query, single_value, time_series
from queries import (
    BY_BOTH,
    BY_TENANT,
    NOTHING_TO_SPLICE,
    RANGE,
    needed,
    or_zero,
    over_range,
    per_minute,
    per_second,
    share,
    total,
)

from boards import forgets

RATIO_COLORS = ((None, "red"), (0.5, "orange"), (0.8, "green"))
FAULT_COLORS = ((None, "green"), (1, "red"))
PLAIN = ((None, "blue"),)

EDITS = "leyline_edits_total"
FAULTS = "leyline_policy_faults_total"
REFUSALS = "leyline_policy_refusals_total"
RELOADS = "leyline_policy_reloads_total"
RECALLS = "leyline_recalls_total"
PUT_BACK = "leyline_recall_tokens_total"
PREFILLED = "leyline_recall_prefilled_tokens_total"


def build() -> dashboard.Dashboard:
    """The board *Leyline / Edits and policies*."""
    board = frame(
        "edits-policies",
        "Edits and policies",
        "Edits of the agents' history, their outcomes, and the work of policies.",
        ("tenant", "model"),
    )
    for add_row in (
        _add_now,
        _add_files_and_forgets,
        _add_edits,
        _add_decisions,
        _add_policies,
        _add_words,
        _add_completions,
        _add_recalls,
        forgets.add_forgets,
    ):
        add_row(board)
    return board


def _add_now(board: dashboard.Dashboard) -> None:
    """Add the row of single numbers."""
    board.with_row(dashboard.Row("Now"))
    amortized = f'{BY_TENANT},mode="amortize",outcome!~"{NOTHING_TO_SPLICE}"'
    spliced = f'{BY_TENANT},mode="amortize",outcome="spliced"'
    board.with_panel(
        single_value(
            "Amortized edits spliced",
            "Share of the edits that may be spliced and were, over the time range; edits with "
            "nothing to move don't count. Bad: below 0.8, where an alert fires "
            "(LeylineFallbackRate); *Edits by outcome* has the reasons.",
            Query(share(spliced, amortized, EDITS, RANGE), instant=True),
            unit="percentunit",
            thresholds=RATIO_COLORS,
        )
    )
    board.with_panel(
        single_value(
            "Edits",
            "Edits of earlier messages over the time range, by any author. Bad: 0 although "
            "policies are configured; they find nothing to do, or the edits wait.",
            Query(or_zero(over_range(EDITS, BY_TENANT)), instant=True),
            unit="short",
            thresholds=PLAIN,
        )
    )
    board.with_panel(
        single_value(
            "Policy faults since start",
            "Policies that raised, took too long or returned nonsense. The turn was sent without "
            "them, or refused if they forget. Bad: anything but 0.",
            Query(f"{or_zero(total(FAULTS))} + {or_zero(total(REFUSALS))}"),
            unit="short",
            thresholds=FAULT_COLORS,
        )
    )


def _add_files_and_forgets(board: dashboard.Dashboard) -> None:
    """Add files and forgets, in single numbers."""
    board.with_panel(
        single_value(
            "Policy files refused",
            "Changes of the policies file since the start that were wrong; the previous policies "
            "apply. Bad: anything but 0; the log has the error.",
            Query(or_zero(total(RELOADS, 'result="refused"'))),
            unit="short",
            thresholds=FAULT_COLORS,
        )
    )
    board.with_panel(
        single_value(
            "KV freed by forget",
            "Tokens over the time range whose KV was overwritten and given back. Bad: 0 while a "
            "policy redacts.",
            Query(or_zero(over_range("leyline_freed_tokens_total", BY_BOTH)), instant=True),
            unit="short",
            thresholds=PLAIN,
        )
    )
    board.with_panel(
        single_value(
            "Sessions that wait for a forget",
            "Sessions with a forget that some engine has not confirmed yet. Bad: above 0 for "
            "minutes (alert LeylineForgetsPending); the removed text may still be there.",
            Query(or_zero(total("leyline_erasures_owed"))),
            unit="short",
            thresholds=FAULT_COLORS,
        )
    )
    board.with_panel(
        single_value(
            "Forgets known to one process only",
            "Sessions with an owed forget that isn't in the store of debts. Bad: above 0; if a "
            "process is killed now, it is lost.",
            Query(or_zero(total("leyline_erasures_unsaved"))),
            unit="short",
            thresholds=FAULT_COLORS,
        )
    )


def _add_edits(board: dashboard.Dashboard) -> None:
    """Add edits, their sources, and their savings."""
    board.with_row(dashboard.Row("Edits"))
    board.with_panel(
        time_series(
            "Edits by outcome",
            "Edits per minute by the reason in the engine's receipt (all models). Bad: anything "
            "but spliced, except reprefilled for exact and forget edits.",
            [Query(per_minute(EDITS, BY_TENANT, "outcome"), "{{outcome}}")],
            unit="cpm",
            stacked=True,
        )
    )
    board.with_panel(
        time_series(
            "Edits by cause and mode",
            "Edits per minute by author (policy, the caller's declaration, the caller "
            "without one, the chat template) and mode. Bad: many undeclared exact "
            "edits of tool results; consider mapping that role to amortize for the tenant.",
            [Query(per_minute(EDITS, BY_TENANT, "cause, mode"), "{{cause}}: {{mode}}")],
            unit="cpm",
            stacked=True,
        )
    )


def _add_decisions(board: dashboard.Dashboard) -> None:
    """Add the edits that were sent, and their delays."""
    board.with_panel(
        time_series(
            "Directives by mode and reason",
            "Directives sent to the engine per minute, by mode and the reason in the receipt. One "
            "edit may take several. Bad: token_mismatch, invalid_directive or transform_failed; "
            "proxy and engine don't agree (LeylineSpliceErrors).",
            [
                Query(
                    per_minute("leyline_directives_total", "", "mode, reason"),
                    "{{mode}}: {{reason}}",
                )
            ],
            unit="cpm",
            stacked=True,
            width=8,
        )
    )
    board.with_panel(
        time_series(
            "Decisions of the scheduler",
            "Turns per minute with edits that could wait, by decision. Bad: edits that "
            "always wait while prompts grow; lower `edit_pressure` or raise `edit_carry`.",
            [Query(per_minute("leyline_schedule_decisions_total", "", "decision"), "{{decision}}")],
            unit="cpm",
            stacked=True,
            width=8,
        )
    )
    board.with_panel(
        time_series(
            "New lineages",
            "Turns per minute that began a new lineage: from their first spliced "
            "position on, only their conversation finds the KV. Bad: one on nearly every turn of "
            "many sessions; the pool fills with copies. Let edits come in batches. "
            "Kept states: turns whose recurrent states still hold what was cut. Bad: any of a "
            "tenant that needs exact answers.",
            [
                Query(per_minute("leyline_lineages_total", BY_BOTH, "tenant"), "{{tenant}}"),
                Query(
                    per_minute("leyline_kept_states_total", BY_BOTH, "tenant"),
                    "kept states: {{tenant}}",
                ),
            ],
            unit="cpm",
            width=8,
        )
    )


def _add_policies(board: dashboard.Dashboard) -> None:
    """Add the policies' edits, notes and faults."""
    board.with_row(dashboard.Row("Policies"))
    board.with_panel(
        time_series(
            "Messages edited by policy",
            "Messages per minute that were edited or left out, by policy and mode; an edit counts "
            "on each turn on which it applies. Bad: 0 for a policy that should act, or a policy "
            "that forgets on every turn of most sessions (its prefixes are expensive).",
            [
                Query(
                    per_minute("leyline_policy_messages_total", "", "policy, mode"),
                    "{{policy}}: {{mode}}",
                )
            ],
            unit="cpm",
            stacked=True,
        )
    )
    board.with_panel(
        time_series(
            "Policy faults",
            "Policies that were skipped for a turn, and requests that were refused because a "
            "policy that forgets failed, as totals since the proxy started: a step upwards is a "
            "fault. raised: an exception; timed_out: too slow; bad_type, bad_message: no list of "
            "messages; broken_pair: a tool result without its call; lost_last_user: the user's "
            "last message is gone. Bad: any step.",
            [
                Query(total(FAULTS, "", "policy, fault"), "{{policy}}: {{fault}}"),
                Query(total(REFUSALS, "", "policy, fault"), "refused by {{policy}}: {{fault}}"),
            ],
            unit="short",
        )
    )


def _add_words(board: dashboard.Dashboard) -> None:
    """Add the policies' notes, and the reloads of their file."""
    board.with_panel(
        time_series(
            "Notes of policies",
            "What policies reported per minute without editing: warnings, what a dry run would "
            "do, edits that wait. Bad: near_limit; sessions are about to fill the model's window.",
            [
                Query(
                    per_minute("leyline_policy_notes_total", "", "policy, kind"),
                    "{{policy}}: {{kind}}",
                )
            ],
            unit="cpm",
            width=8,
        )
    )
    board.with_panel(
        time_series(
            "Reloads of the policies file",
            "Changes of the policies file since the proxy started, loaded or refused. "
            "Bad: a step of refused; the previous policies apply.",
            [Query(total(RELOADS, "", "result"), "{{result}}")],
            unit="short",
            width=8,
        )
    )


def _add_completions(board: dashboard.Dashboard) -> None:
    """Add the texts that models write for policies and in place of conversations."""
    board.with_panel(
        time_series(
            "Texts written for policies",
            "Texts per minute that policies asked a model to write (summaries), by result. "
            "Bad: failed; the policy continues without the text, and asks again.",
            [Query(per_minute("leyline_policy_completions_total", "", "result"), "{{result}}")],
            unit="cpm",
            width=8,
        )
    )
    board.with_panel(
        time_series(
            "Tokens of texts for policies",
            "Tokens per minute of policies' questions about a conversation, by source, and of the "
            "answers. Bad: as many prefilled as cached; the questions don't share the session's "
            "cache.",
            [
                Query(
                    per_minute("leyline_policy_completion_tokens_total", "", "source"), "{{source}}"
                )
            ],
            unit="cpm",
            width=8,
        )
    )
    board.with_panel(
        time_series(
            "Compactions",
            "Summaries per minute that requests asked for in place of their conversation, by "
            "result. Bad: failed; the requests are answered with their whole conversation.",
            [Query(per_minute("leyline_compactions_total", "", "result"), "{{result}}")],
            unit="cpm",
            width=8,
        )
    )


def _add_recalls(board: dashboard.Dashboard) -> None:
    """Add the recalls, and the policies' error rate."""
    board.with_row(dashboard.Row("Recalls"))
    board.with_panel(
        time_series(
            "Recalls by way and verdict",
            "Texts per minute that were asked for: by the model (tool), a message (reference), a "
            "request's working set (context), or POST …/recall (api). hit: from resident KV; "
            "fault: from the store; recompute: from the client's list. Bad: refuse and abstain; "
            "the label `cause` of `leyline_recalls_total` says why.",
            [Query(per_minute(RECALLS, BY_TENANT, "way, verdict"), "{{way}}: {{verdict}}")],
            unit="cpm",
            stacked=True,
            width=8,
        )
    )
    in_prompts = f'{BY_TENANT},way!="api"'
    put_back, prefilled = (per_second(metric, in_prompts, "") for metric in (PUT_BACK, PREFILLED))
    board.with_panel(
        time_series(
            "Tokens put back",
            "Tokens per second of recalled texts in prompts: copied from resident KV, or prefilled "
            "again. Bad: mostly prefilled; the engine no longer has their KV, or `reuse` is off.",
            [Query(f"{put_back} - {prefilled}", "copied"), Query(prefilled, "prefilled")],
            unit="short",
            stacked=True,
            width=8,
        )
    )
    board.with_panel(
        time_series(
            "Evicted tokens that were needed, by policy",
            "The policies' error rate: tokens that were put back (recalled), or that the model "
            "wrote word for word without having them (quoted), of those evicted; over six hours. "
            "What is needed later than it was evicted can lift it above its true value for a "
            "while. Bad: above 0.1; the policy evicts what agents still need. Above 0.2 for a day "
            "an alert fires (LeylineEvictionsNeeded).",
            [
                Query(needed("recalled", BY_TENANT, "6h"), "{{policy}}: recalled"),
                Query(needed("quoted", BY_TENANT, "6h"), "{{policy}}: quoted"),
            ],
            unit="percentunit",
            width=8,
        )
    )
