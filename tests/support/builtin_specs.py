"""Every built-in policy with settings under which it acts on small conversations, too."""

from __future__ import annotations

SPECS: dict[str, tuple[str, ...]] = {
    "cache_ttl_prune": ("cache_ttl_prune:min_prunable_chars=0,ttl=1s,window_tokens=50",),
    "clear_thinking": (
        "clear_thinking",
        "clear_thinking:keep=0,think_tags=true",
        "clear_thinking:unit=message",
    ),
    "clear_tool_uses": (
        "clear_tool_uses:trigger_tokens=20,keep=1",
        "clear_tool_uses:trigger_tokens=20,keep=0,clear_tool_inputs=true",
    ),
    "closed_window": ("closed_window",),
    "compact_on_request": (
        "compact_on_request:tool=bash,policies=['sliding_window:max_messages=3';'drop_images']",
        "compact_on_request:tool=bash,min_tokens=20,max_requests=2,"
        "policies=['relevance:trigger_tokens=20,keep_tokens=5']",
    ),
    "deduplicate_calls": ("deduplicate_calls", "deduplicate_calls:exclude_tools=[bash]"),
    "deduplicate_reads": ("deduplicate_reads",),
    "drop_failed_calls": ("drop_failed_calls",),
    "drop_images": ("drop_images", "drop_images:keep_last=2"),
    "fallback": (
        "fallback:max_tokens=60,patience_turns=1,policies=['summarize:trigger_tokens=40,"
        "keep_messages=2';'sliding_window:max_messages=4']",
        "fallback:max_fraction=0.4,patience_turns=0,policies=['truncate_older_than:n=1,"
        "max_chars=70';'sliding_window:max_messages=4']",
    ),
    "head_tail_clamp": ("head_tail_clamp:max_chars=400,head_chars=9,tail_chars=9",),
    "keep_all": ("keep_all",),
    "last_n_observations": ("last_n_observations:n=1",),
    "loop_guard": ("loop_guard:repeats=2", "loop_guard:repeats=2,max_period=1"),
    "model_prune": ("model_prune",),
    "observation_masking": ("observation_masking:attention_window=2",),
    "offload": (
        "offload:max_chars=500,preview_chars=20",
        "offload:max_chars=700,preview_chars=9,part_chars=300",
    ),
    "pin_system": ("pin_system", "pin_system:now=omit"),
    "prune": ("prune:protect_tokens=10,minimum_tokens=5,recent_turns=1",),
    "quarantine": ("quarantine", "quarantine:rules=[],patterns=[ok]"),
    "redact": (r"redact:pattern='sk-\w+'", "redact:detectors=[email;ip_address]"),
    "relevance": (
        "relevance:trigger_tokens=60,keep_tokens=20",
        "relevance:trigger_fraction=0.4,trigger_tokens=none,target_tokens=9,keep_tokens=5,"
        "truncated_result_chars=0,judge_tokens=40",
    ),
    "remove_regex": ("remove_regex:remove=[ab+;<diff>.*?</diff>]", "remove_regex:keep_last=2"),
    "sliding_window": (
        "sliding_window:max_messages=4",
        "sliding_window:max_messages=3,keep_messages=2,keep_first=0",
        "sliding_window:max_tokens=60",
        "sliding_window:max_fraction=0.5",
        "sliding_window:max_messages=4,notices=true",
    ),
    "summarize": (
        "summarize:trigger_tokens=60,keep_messages=2",
        "summarize:trigger_tokens=60,keep_messages=2,notices=true",
    ),
    "tiered": (
        "tiered:target_tokens=70,tiers=['clear_tool_uses:trigger_tokens=0,keep=1';"
        "'sliding_window:max_messages=4']",
        "tiered:target_fraction=0.5,patience_turns=1,tiers=[deduplicate_calls;drop_images;"
        "'summarize:trigger_tokens=1,keep_messages=2';'sliding_window:max_messages=3']",
    ),
    "tool_output_trimmer": (
        "tool_output_trimmer:recent_turns=1,max_output_chars=20,preview_chars=5",
    ),
    "truncate_older_than": ("truncate_older_than:n=1,max_chars=70",),
    "warn_near_limits": (
        "warn_near_limits:threshold=0.2",
        "warn_near_limits:max_tokens=60,place=end",
    ),
}
"""By name; the first of each is the one for tests that need only one."""

CASES = [spec for specs in SPECS.values() for spec in specs]

FORGETTING = {"quarantine", "redact"}
"""Policies that forget, whose edits nobody can take back."""


def recallable(spec: str) -> str:
    """A spec of one policy with stubs for what it evicts."""
    return f"{spec}{',' if ':' in spec else ':'}recallable=true"


RECALLABLE = [recallable(spec) for spec in CASES if spec.partition(":")[0] not in FORGETTING]
