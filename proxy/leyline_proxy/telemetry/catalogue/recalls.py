"""Recalls of evicted texts, and the error rate of the policies that evicted them."""

from __future__ import annotations

from .entries import CatalogueEntry, Group, counter

_RECALLS: tuple[CatalogueEntry, ...] = (
    counter(
        "recalls",
        "Texts that were asked for by address, by tag or by tool. way: by the model (tool), a "
        "message (reference), a request's working set (context), or POST …/recall (api). verdict: "
        "hit, fault and recompute put the text back, from resident KV, from the store, and from "
        "the client's own list; refuse and abstain did not, and cause says why (none otherwise).",
        ("tenant", "way", "verdict", "cause"),
        bad="'store_down': the store of evicted texts can't be read. 'unknown' often: the model "
        "invents addresses, or texts expire too early (recall_ttl_s). 'over_budget' or 'limit' "
        "often: raise recall_tokens or recall_calls, or evict less.",
    ),
    counter(
        "recall_tokens",
        "Tokens of texts that were put back, by way and verdict; with api, approximate tokens of "
        "texts that a caller received.",
        ("tenant", "way", "verdict"),
    ),
    counter(
        "recall_prefilled_tokens",
        "The tokens of leyline_recall_tokens that the engine computed again; the others came from "
        "resident KV.",
        ("tenant", "way"),
        bad="Most of them: the engine no longer has the KV of what is recalled, or reuse is off.",
    ),
    counter(
        "evicted_tokens",
        "Tokens that a policy evicted with an address and that were nowhere else in the prompt. A "
        "text counts once per session, when it is first evicted.",
        ("tenant", "policy"),
    ),
    counter(
        "evicted_recalled_tokens",
        "Tokens of leyline_evicted_tokens that turned out to be needed, because their text was put "
        "back later; each text counts once, without what was quoted before. With the quoted "
        "tokens, and divided by the evicted ones, this is the policy's error rate.",
        ("tenant", "policy"),
        bad="Above a tenth of leyline_evicted_tokens: the policy evicts what agents still need.",
    ),
    counter(
        "evicted_quoted_tokens",
        "Tokens of leyline_evicted_tokens that turned out to be needed, because the model wrote "
        "them word for word (runs of 32 characters or more) without having them in its prompt.",
        ("tenant", "policy"),
        bad="High without recalls: the model writes evicted text from memory and may be wrong.",
    ),
)

GROUPS = (
    Group(
        "Recalls and the policies' error rate",
        "Evicted texts that were needed again; counted for tenants with `recall: on`.",
        _RECALLS,
    ),
)
