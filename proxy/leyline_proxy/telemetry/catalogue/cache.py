"""Turns and tokens: cache hits, and losses by cause."""

from __future__ import annotations

from leyline_engine.contract import Outcome, Reason

from ...model.vocabulary import CAUSES
from .entries import CatalogueEntry, Group, counter

_TENANT_MODEL = ("tenant", "model")
_AT_FIRST_TURN = ((),)

_ERRORS = (
    Reason.TOKEN_MISMATCH,
    Reason.TRANSFORM_FAILED,
    Reason.INCOMPATIBLE_IDENTITY,
    Reason.INVALID_DIRECTIVE,
    Reason.INVALID_EDIT,
)
"""A single one of these is worth an alert."""

_TURNS: tuple[CatalogueEntry, ...] = (
    counter(
        "turns",
        "Chat turns by the outcome of their edits.",
        ("tenant", "model", "outcome", "reason"),
        bad="'reprefilled' with a reason other than 'reprefilled', 'not_worth_it' or "
        "'nothing_to_reuse': a splice was expected and didn't happen.",
        starts=tuple((Outcome.REPREFILLED.value, reason.value) for reason in _ERRORS),
    ),
    counter(
        "prompt_tokens",
        "Prompt tokens by the source of their KV (cached, spliced, reused, prefilled) and by the "
        "number of the turn in its session.",
        ("tenant", "model", "source", "turn"),
        bad="Mostly 'prefilled' in later turns of sessions: the cache isn't hit; "
        "leyline_cache_busts_total has the causes.",
    ),
    counter(
        "reuse_tokens",
        "Prompt tokens whose content the engine held elsewhere: copied in mode live, only counted "
        "in mode observe. By what their KV has read: clean, only text that the prompt begins "
        "with; session, other text of the session; tenant, text of another session.",
        ("tenant", "model", "mode", "kind"),
        bad="Much in mode observe: prefill that mode live would avoid.",
    ),
    counter(
        "reuse_gated",
        "Turns for which the engine gave reuse up because the margin of a first token was below "
        "reuse_margin: the turn itself (replay engine), or the session's turn before (SGLang).",
        _TENANT_MODEL,
        bad="A large share of the turns that reuse: they cost their prefill, and more.",
    ),
    counter(
        "completion_tokens",
        "Tokens that engines generated for chat turns, if the engines report them.",
        _TENANT_MODEL,
    ),
    counter(
        "freed_tokens",
        "KV slots given back to the pool by edits.",
        _TENANT_MODEL,
        starts=_AT_FIRST_TURN,
    ),
    counter(
        "receipts_missing",
        "Turns whose engine gave no receipt.",
        ("model",),
        bad="Above 0: an engine with the plugin doesn't account for turns; edits can't use them.",
        starts=_AT_FIRST_TURN,
    ),
    counter(
        "lineages",
        "Turns that began a new lineage: KV after a splice, private to its session.",
        _TENANT_MODEL,
        starts=_AT_FIRST_TURN,
    ),
    counter(
        "kept_states",
        "Turns whose edits copied recurrent states, which still hold what was cut "
        "(recurrent_edits).",
        _TENANT_MODEL,
        bad="Above 0 for a tenant that needs exact answers: set its recurrent_edits to exact.",
        starts=_AT_FIRST_TURN,
    ),
    counter(
        "directives",
        "Directives that engines reported on, by mode and by the reason in the receipt.",
        ("mode", "reason"),
        bad="'missing_source' or 'source_evicted': the engine's pool is too small for its "
        "sessions. 'token_mismatch': proxy and engine disagree on a prompt.",
    ),
)

_SAVED: tuple[CatalogueEntry, ...] = (
    counter(
        "prefill_avoided_tokens",
        "Prompt tokens that were spliced after an edit, or reused from elsewhere, instead of being "
        "prefilled.",
        _TENANT_MODEL,
        starts=_AT_FIRST_TURN,
    ),
    counter(
        "prefill_avoided_seconds",
        "The same in seconds, less the time of the splices. This estimate is rather too high: "
        "tokens times the median of an engine's time to first token per prefilled token, "
        "from the model's last streamed turns; 0 until there is one.",
        _TENANT_MODEL,
        starts=_AT_FIRST_TURN,
    ),
)

_BY_CAUSE = tuple((cause,) for cause in CAUSES)

_LOST: tuple[CatalogueEntry, ...] = (
    counter(
        "cache_busts",
        "Turns in which tokens that the session had in reach were prefilled again, by cause. A "
        "turn counts once for each cause. Causes: policy, declared and undeclared edits, "
        "compaction (a summary in place of the history), template, tools (the set or one of its "
        "options changed), recall (evicted text was put back in front of them), session (the list "
        "continues a session with another id), failover (another engine served the turn), "
        "engine (nothing was edited: evicted, or restarted).",
        ("tenant", "model", "cause"),
        bad="'engine': the KV pool is too small. 'failover': engines fail, or come and go. "
        "'undeclared', 'template': a client rewrites its history in a way that a rule could "
        "allow to splice. 'tools': a client changes its tools between turns. 'session': a client "
        "gives one conversation several ids.",
        starts=_BY_CAUSE,
    ),
    counter(
        "cache_bust_tokens",
        "Tokens of those busts: prompt tokens that the retained turn closest to this one had, and "
        "that were prefilled again. The cause is the first edit that cut them. For engines that "
        "only report cached_tokens, an estimate from the lengths of messages.",
        ("tenant", "model", "cause"),
        starts=_BY_CAUSE,
    ),
    counter(
        "reasoning_edit_tokens",
        "Prompt tokens after thinking that the chat template stripped. kept: copied, as "
        "reasoning_edits is amortize; exact would have prefilled them. lost: prefilled, as it is "
        "exact; amortize would have copied them.",
        ("tenant", "model", "effect"),
        bad="'lost' grows: reasoning_edits is exact for the tenant or the model, or its sessions "
        "have no certain name.",
        starts=(("kept",), ("lost",)),
    ),
    counter(
        "cache_discrepancy_tokens",
        "Tokens by which the engine's cached_tokens differ from the number that the proxy "
        "expected. lost: fewer were cached; found: more were. Differences below 64 tokens are "
        "due to an engine's pages and don't count, and neither do turns that forget.",
        ("tenant", "model", "direction"),
        bad="'lost' grows: the engine evicts what sessions still need, or refuses splices. "
        "'found' grows: others send the same prompts, or turns are missing in the account.",
        starts=(("lost",), ("found",)),
    ),
)

GROUPS = (
    Group("Turns and tokens", "Chat turns and the origin of their KV.", _TURNS),
    Group("Savings by splicing", "Prefill that didn't happen.", _SAVED),
    Group(
        "Cache losses",
        "Every prompt token of a turn is cached, spliced, reused, lost to one cause, or new.",
        _LOST,
    ),
)
