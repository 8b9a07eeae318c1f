"""The policies that come with Leyline, each in a module of its own that is imported on demand."""

from __future__ import annotations

BUILTINS: dict[str, str] = {
    "cache_ttl_prune": "CacheTtlPrune",
    "clear_thinking": "ClearThinking",
    "clear_tool_uses": "ClearToolUses",
    "closed_window": "ClosedWindow",
    "compact_on_request": "CompactOnRequest",
    "deduplicate_calls": "DeduplicateCalls",
    "deduplicate_reads": "DeduplicateReads",
    "drop_failed_calls": "DropFailedCalls",
    "drop_images": "DropImages",
    "fallback": "Fallback",
    "head_tail_clamp": "HeadTailClamp",
    "keep_all": "KeepAll",
    "last_n_observations": "LastNObservations",
    "loop_guard": "LoopGuard",
    "model_prune": "ModelPrune",
    "observation_masking": "ObservationMasking",
    "offload": "Offload",
    "pin_system": "PinSystem",
    "prune": "Prune",
    "quarantine": "Quarantine",
    "redact": "Redact",
    "relevance": "Relevance",
    "remove_regex": "RemoveRegex",
    "sliding_window": "SlidingWindow",
    "summarize": "Summarize",
    "tiered": "Tiered",
    "tool_output_trimmer": "ToolOutputTrimmer",
    "truncate_older_than": "TruncateOlderThan",
    "warn_near_limits": "WarnNearLimits",
}
"""The classes of the policies by name; a policy's name is its module's, too."""
