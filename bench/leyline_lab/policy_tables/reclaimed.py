"""The tokens that each built-in policy reclaims of recorded sessions: a table in docs/policies.md.

Every session is played turn by turn, as ``leyline policies try --window 32000 --idle 10m`` does.
Counted are the tokens of the last request, before and after the policy, over a file's sessions
together. The figures follow from the recordings and the policies alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from leyline_policies import load_pipeline
from leyline_policies.builtin import BUILTINS

from ..harness import markdown
from ..harness.arguments import Arguments
from ..harness.report import progress
from ..policy_trial.trial import TrialOptions, TurnTrial, try_session
from ..traces.recordings import Trace, read_trace

OPTIONS = TrialOptions(window=32_000, idle_s=600.0)
SETTINGS = {
    "cache_ttl_prune": "min_prunable_chars=20000",
    "clear_tool_uses": "trigger_tokens=4000",
    "compact_on_request": "policies=['sliding_window:max_messages=40']",
    "deduplicate_reads": "tools=[get_reservation_details],path_keys=[reservation_id]",
    "fallback": "max_tokens=8000,policies=['summarize:trigger_tokens=4000';"
    "'sliding_window:max_messages=40']",
    "observation_masking": "attention_window=20",
    "prune": "protect_tokens=2000,minimum_tokens=500",
    "redact": "detectors=[keys;pii]",
    "remove_regex": r"remove=['<returncode>0</returncode>\n';'\[Python Interpreter: .*?\]\n']",
    "sliding_window": "max_messages=40",
    "tiered": "target_tokens=4000,tiers=['clear_tool_uses:trigger_tokens=0';"
    "'sliding_window:max_messages=40']",
}
"""Settings where the defaults are for longer sessions, or for other tools."""

BEGIN = markdown.mark("policy-table")
NOTHING = "·"


def spec(name: str) -> str:
    """Return a policy with its settings."""
    return f"{name}:{SETTINGS[name]}" if name in SETTINGS else name


def last_turns(name: str, trace: Trace) -> list[TurnTrial]:
    """Return the last turn of each session under a policy.

    Raises:
        RuntimeError: the policy broke a rule.
    """
    last = []
    for session in trace.sessions:
        requests = [request.messages for request in session.requests]
        turns = try_session(session.id, requests, load_pipeline(spec(name)), OPTIONS).turns
        if faults := [fault for turn in turns for fault in turn.faults]:
            raise RuntimeError(f"{spec(name)} on {session.id}: {faults[0]}")
        last.append(turns[-1])
    return last


def unedited(trace: Trace) -> int:
    """Return the tokens of the last requests as their clients sent them."""
    return sum(turn.original_tokens for turn in last_turns("keep_all", trace))


def reclaimed(name: str, trace: Trace) -> int:
    """Return the tokens that a policy removes from the last requests."""
    return sum(turn.original_tokens - turn.sent_tokens for turn in last_turns(name, trace))


def column(path: Path) -> str:
    """Return the title of a file's column."""
    return path.name.partition(".")[0].replace("_", " ")


def row(label: str, figures: Sequence[int]) -> list[str]:
    """Return a row of the table."""
    return [label, *(f"{figure:,}" if figure else NOTHING for figure in figures)]


def table(traces: Mapping[str, Trace]) -> str:
    """Return the whole table, without policies that find nothing to do; then the settings.

    Args:
        traces: traces by column.
    """
    rows = [row("unedited", [unedited(trace) for trace in traces.values()])]
    shown = []
    with progress("policies", len(BUILTINS)) as step:
        for name in sorted(BUILTINS):
            figures = [reclaimed(name, trace) for trace in traces.values()]
            if any(figures):
                rows.append(row(f"`{name}`", figures))
                shown.append(name)
            step()
    specs = [spec(name) for name in shown if name in SETTINGS]
    return "\n".join([markdown.table(["", *traces], rows), "", "```text", *specs, "```"])


def main() -> None:
    """Play, and print or write the table."""
    parser = Arguments(__doc__, json=False)
    parser.add_argument("traces", nargs="+", type=Path, help="recorded sessions, .jsonl(.gz)")
    parser.add_argument("--into", type=Path, metavar="FILE.md", help="replace the table in here")
    given = parser.parse_args()
    text = table({column(path): read_trace(path) for path in given.traces})
    markdown.write(text, given.into, BEGIN)
