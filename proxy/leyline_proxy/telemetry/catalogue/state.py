"""Sessions, the proxy itself, and the audit log."""

from __future__ import annotations

from ..bounded import CAPS
from .entries import CatalogueEntry, Group, counter, gauge

_SESSIONS: tuple[CatalogueEntry, ...] = (
    gauge(
        "sessions",
        "Sessions in the store.",
        merge="livemostrecent",
        bad="Far above the number of agents: sessions aren't recognised, and each turn begins a "
        "new one.",
    ),
    gauge(
        "session_store_up",
        "1 when sessions can be read and written, 0 when their store can't be reached.",
        merge="livemin",
        bad="0: turns aren't spliced until it is back.",
    ),
    gauge("live_viewers", "Browsers that show the live page.", merge="livesum"),
)

_PROXY: tuple[CatalogueEntry, ...] = (
    gauge("build_info", "Always 1.", ("version",), merge="livemostrecent"),
    counter(
        "label_overflow",
        "Label values that were replaced by 'other' because a label had too many.",
        ("label",),
        bad="Above 0: an upstream lists hundreds of models, or a policy makes up names.",
        starts=tuple((label,) for label, cap in CAPS.items() if cap is not None),
    ),
    gauge(
        "audit_up",
        "1 when the audit log is written, 0 when it fails; also 1 where there is none.",
        merge="livemin",
        bad="0: records are lost, or requests refused, as audit_on_fault says.",
    ),
    counter(
        "audit_failures",
        "Records that could not be written to the audit log.",
        bad="Above 0: the log has gaps, which its check shows.",
    ),
    counter(
        "audit_stream_failures",
        "Records of the audit log that could not be added to its Redis stream.",
        bad="Above 0: Redis couldn't be reached; the files hold the records.",
    ),
)

_WARM_OUTCOMES = (
    "replayed",
    "present",
    "elsewhere",
    "over_tokens",
    "over_time",
    "expired",
    "forgotten",
    "unknown_session",
    "switched_off",
    "corrupt",
    "wrong_key",
    "other_tenant",
    "other_model",
    "other_tokenizer",
    "too_large",
    "unreadable",
    "engine_failed",
)

_WARM: tuple[CatalogueEntry, ...] = (
    counter(
        "warm_start_runs",
        "Prompts that a new engine should have got, and manifests that gave none, by outcome. "
        "present: this run of the engine computed it; elsewhere: another engine serves its "
        "session; forgotten: its session has forgotten something since; unknown_session: no forget "
        "could find its session.",
        ("outcome",),
        bad="'corrupt', 'wrong_key', 'other_tenant', 'unreadable', 'too_large': manifests are "
        "damaged or foreign, and were deleted. 'over_time': the engine is slow; 'engine_failed': "
        "it refused.",
        starts=tuple((outcome,) for outcome in _WARM_OUTCOMES),
    ),
    counter("warm_start_tokens", "Prompt tokens that were replayed into new engines."),
    counter(
        "warm_start_files",
        "Changes of the warm start's files by result. failed: the file is as it was; left: it may "
        "still hold what had to go.",
        ("result",),
        bad="'left' above 0: forgotten text may still be on the disk, encrypted; delete the files. "
        "'failed': the disk is full, or its folder can't be written to.",
        starts=(("written",), ("removed",), ("failed",), ("left",)),
    ),
)

_RECALL: tuple[CatalogueEntry, ...] = (
    gauge(
        "recall_store_up",
        "1 when evicted texts can be stored and recalled, 0 when their store can't be used; also 0 "
        "where recall is off.",
        merge="livemin",
        bad="0 where recall is on: stubs can't be brought back, and evicted texts are lost.",
    ),
    counter(
        "recall_store_errors",
        "Operations that the store of evicted texts could not do.",
        ("operation",),
        bad="'forget' or 'delete' above 0: the store didn't know of it then; see "
        "leyline_recall_forgets_owed. 'put': texts were evicted that can't be recalled.",
        starts=(("put",), ("get",), ("list",), ("forget",), ("delete",), ("look",), ("tidy",)),
    ),
    gauge(
        "recall_store_entries",
        "Evicted texts and forgets in this proxy's memory; 0 if they are stored elsewhere.",
        merge="livesum",
    ),
    gauge(
        "recall_store_bytes",
        "Size of evicted texts and forgets in this proxy's memory; 0 if they are stored elsewhere.",
        merge="livesum",
        bad="At recall_memory_bytes: the tenant with the most loses its oldest.",
    ),
    gauge(
        "recall_forgets_owed",
        "Sessions with a forget that the store of evicted texts doesn't know yet. Nothing of them "
        "can be recalled meanwhile.",
        merge="livesum",
        bad="Above 0 for minutes: the store is down, and holds texts that had to go.",
    ),
)

GROUPS = (
    Group("Sessions", "Conversations that the proxy remembers.", _SESSIONS),
    Group("Warm start", "Prompts that are replayed into new engines.", _WARM),
    Group("Recall", "Evicted texts that can be brought back.", _RECALL),
    Group("The proxy itself", "Version, limits, audit log.", _PROXY),
)
