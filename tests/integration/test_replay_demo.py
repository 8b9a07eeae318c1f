"""The demonstration, as a newcomer runs it."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from leyline_proxy.cli.main import build_app
from leyline_proxy.demo import DEFAULT_POLICY
from leyline_proxy.demo.run import run_against, shipped_trace
from leyline_proxy.replay.results import Arm, summarise
from leyline_proxy.replay.stack import StackOptions, running_stack


def test_demo_runs_both_arms(tmp_path: Path) -> None:
    """``leyline demo`` starts a server per arm, prints the table and writes the picture."""
    picture = tmp_path / "out" / "demo.png"
    done = CliRunner().invoke(
        build_app(), ["demo", "--limit", "6", "--plot", str(picture), "--bars"]
    )
    assert done.exit_code == 0, done.output
    for part in ("no cache", "radix", "splice", "Leyline reused", "tokens by turn"):
        assert part in done.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_demo_against_a_running_stack() -> None:
    """With an address, the policy travels with each request, and edits are spliced."""
    trace = shipped_trace().first(9)
    with running_stack(StackOptions(), splice=True) as stack:
        runs = run_against(stack.origin, "demo", trace, DEFAULT_POLICY, lambda arm, done: None)
    assert set(runs) == {Arm.OFF, Arm.SPLICE}
    total = summarise(runs[Arm.SPLICE])
    assert total.requests == 9 and total.spliced_tokens > 0


def test_demo_says_when_nothing_answers() -> None:
    """A wrong address ends with status 1 and one line."""
    done = CliRunner().invoke(build_app(), ["demo", "--url", "http://127.0.0.1:9", "--limit", "1"])
    assert done.exit_code == 1
    assert "leyline demo: no OpenAI-compatible service at" in done.output
