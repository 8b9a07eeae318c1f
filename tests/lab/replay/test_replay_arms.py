"""A replay on real stacks: the embedded engine and the proxy, driven by the OpenAI SDK."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from leyline_lab.engines.stack import StackOptions
from leyline_lab.errors import StackError
from leyline_lab.replay.arms import replay
from leyline_lab.replay.results import Arm, ReplayReport
from leyline_lab.traces.recordings import (
    Message,
    RecordedSession,
    Trace,
    TraceRequest,
)
from leyline_proxy.cli.main import build_app

BOTH = (Arm.RADIX, Arm.SPLICE)
OLD = "(older output removed)"


def listing(turn: int) -> str:
    """A long result; no two turns share their words, so that only history is unchanged."""
    words = random.Random(turn)
    names = ("".join(words.choices(string.ascii_lowercase, k=9)) for _ in range(24))
    return "\n".join(f"{name} {words.randrange(10**6)}" for name in names)


def conversation(turns: int) -> list[Message]:
    """An agent that calls one tool per turn; results are long."""
    messages: list[Message] = [
        {"role": "system", "content": "You are a careful agent with one tool. " * 4},
        {"role": "user", "content": "Count the lines of every module, then report."},
    ]
    for turn in range(turns):
        call = {"name": "bash", "arguments": json.dumps({"command": f"wc -l part_{turn}"})}
        calls = [{"id": f"call_{turn}", "type": "function", "function": call}]
        messages += [
            {"role": "assistant", "content": f"Part {turn} next.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": f"call_{turn}", "content": listing(turn)},
        ]
    return messages


def truncating_harness(turns: int, keep: int = 2) -> Trace:
    """A client that cuts all but its last tool results by itself, as SWE-agent does."""
    whole = conversation(turns)
    requests = []
    for turn in range(turns + 1):
        messages = [dict(message) for message in whole[: 2 + 2 * turn]]
        results = [message for message in messages if message["role"] == "tool"]
        for message in results[:-keep]:
            message["content"] = OLD
        requests.append(TraceRequest(tuple(messages)))
    return Trace((RecordedSession("harness", tuple(requests)),))


def run(trace: Trace, arms: tuple[Arm, ...] = BOTH, **options: Any) -> ReplayReport:
    """A replay without a progress bar."""
    return replay(trace, arms, StackOptions(**options), lambda arm, done: None)


@pytest.fixture(scope="module")
def mapped() -> ReplayReport:
    """The truncating harness with its tool results mapped to amortize, all three arms."""
    return run(truncating_harness(6), tuple(Arm), undeclared={"tool": "amortize"})


def test_mapped_edits_are_spliced(mapped: ReplayReport) -> None:
    """With tool results mapped, splice reuses what is unchanged, and radix does not."""
    assert mapped.summary(Arm.SPLICE).spliced_tokens > 0
    assert mapped.reuse_of_unchanged(Arm.SPLICE) >= 0.99  # type: ignore[operator]
    assert mapped.reuse_of_unchanged(Arm.RADIX) < 0.9  # type: ignore[operator]
    assert mapped.summary(Arm.SPLICE).outcomes["spliced"] >= 4


def test_radix_never_splices(mapped: ReplayReport) -> None:
    """The radix arm has prefixes only."""
    assert mapped.summary(Arm.RADIX).spliced_tokens == 0


def test_every_arm_serves_every_request(mapped: ReplayReport) -> None:
    """The three arms answer the same requests, and off reuses nothing."""
    totals = [mapped.summary(arm) for arm in Arm]
    assert {total.requests for total in totals} == {7}
    assert len({total.prompt_tokens for total in totals}) == 1
    off = mapped.summary(Arm.OFF)
    assert off.prefilled_tokens == off.prompt_tokens and off.ttft_p50_ms is None
    assert all((total.ttft_p50_ms or 0) > 0 for total in totals[1:])


def test_without_the_option_splice_equals_radix() -> None:
    """Undeclared edits are exact: nothing is spliced, and the figures are the same."""
    report = run(truncating_harness(4))
    radix, splice = report.summary(Arm.RADIX), report.summary(Arm.SPLICE)
    assert splice.spliced_tokens == 0
    assert splice.cached_tokens == radix.cached_tokens


@pytest.mark.parametrize("page", [16, 64])
def test_pages_cost_a_part_of_each_seam(mapped: ReplayReport, page: int) -> None:
    """Prefixes are whole pages, edits are still spliced, and a little less is reused."""
    report = run(truncating_harness(6), undeclared={"tool": "amortize"}, page_tokens=page)
    radix, splice = report.runs[Arm.RADIX], report.summary(Arm.SPLICE)
    assert all(result.cached % page == 0 for result in radix.results)
    assert splice.spliced_tokens > 0
    assert report.pages.tokens == page
    assert 0 < report.rounding(Arm.RADIX) < 7 * page
    fewer = mapped.summary(Arm.SPLICE).prefilled_tokens - splice.prefilled_tokens
    assert -7 * 8 * page < fewer < 0


def test_a_policy_edits_the_history() -> None:
    """A policy's own edits are spliced without any option."""
    messages = conversation(5)
    requests = tuple(TraceRequest(tuple(messages[: 2 + 2 * turn])) for turn in range(6))
    trace = Trace((RecordedSession("policy", requests),))
    report = run(trace, policy="truncate_older_than:n=2,max_chars=60")
    assert report.summary(Arm.SPLICE).spliced_tokens > 0
    assert report.reuse_of_unchanged(Arm.SPLICE) >= 0.99  # type: ignore[operator]


def test_a_prompt_beyond_the_context_ends_its_session() -> None:
    """The refused request is noted, and the session after it is still replayed."""
    long = TraceRequest(({"role": "user", "content": "long words " * 4000},))
    short = TraceRequest(({"role": "user", "content": "hello there"},))
    trace = Trace((RecordedSession("big", (short, long, short)), RecordedSession("s", (short,))))
    report = run(trace, (Arm.RADIX,), pool_tokens=2048)
    assert report.summary(Arm.RADIX).requests == 2
    assert "session big ends before request 2 (2 not sent)" in report.runs[Arm.RADIX].notes[0]


def test_a_wrong_policy_is_named() -> None:
    """A pipeline that cannot be built stops the replay with its own message."""
    with pytest.raises(StackError, match="no_such_policy"):
        run(truncating_harness(1), policy="no_such_policy")


def test_the_command_writes_the_document(tmp_path: Path) -> None:
    """``leyline replay`` writes exactly the members that are promised, and a picture, for
    recordings and plain conversations, one file after the other."""
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    record = {"id": "x", "messages": conversation(3), "calls": [{"n": 2}, {"n": 4}, {"n": 6}]}
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps(record) + "\n", encoding="utf-8")
    plain = tmp_path / "y.json"
    plain.write_text(json.dumps({"model": "m", "messages": conversation(3)}), encoding="utf-8")
    arguments = ["replay", str(file), str(plain), "--policy", "keep_all"]
    arguments += ["--undeclared", "tool=amortize"]
    outputs = ["--limit", "2", "--json", str(out), "--plot", str(picture)]
    done = CliRunner().invoke(build_app(), [*arguments, *outputs])
    assert done.exit_code == 0, done.output
    document = json.loads(out.read_text(encoding="utf-8"))
    pages = {"page_tokens", "rounding_tokens", "reuse_without_rounding"}
    assert set(document) == {"arms", "unchanged_tokens", "reuse_of_unchanged"} | pages
    assert list(document["arms"]) == ["off", "radix", "splice"]
    for arm in document["arms"].values():
        assert set(arm) == {
            "requests",
            "prompt_tokens",
            "cached_tokens",
            "spliced_tokens",
            "reused_tokens",
            "prefilled_tokens",
            "hit_ratio",
            "ttft_ms",
            "outcomes",
        }
        assert arm["requests"] == 4  # two of each file
        assert set(arm["ttft_ms"]) == {"p50", "p90"}
        sources = ("cached_tokens", "spliced_tokens", "reused_tokens", "prefilled_tokens")
        assert sum(arm[source] for source in sources) == arm["prompt_tokens"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_refuses_nonsense(tmp_path: Path) -> None:
    """A missing file and an unknown arm end with status 2 and one line."""
    file = tmp_path / "x.jsonl"
    for arguments in ([str(file)], [str(file), "--arms", "fast"]):
        done = CliRunner().invoke(build_app(), ["replay", *arguments])
        assert done.exit_code == 2
        assert "leyline replay:" in done.output and "Traceback" not in done.output
