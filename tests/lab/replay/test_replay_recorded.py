"""Real recorded sessions with an edited history, where the recordings are at hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from leyline_lab.engines.stack import StackOptions
from leyline_lab.replay.arms import replay
from leyline_lab.replay.results import Arm, ReplayReport
from leyline_lab.stand_ins.random_models import RandomKind, build_random
from leyline_lab.traces.recordings import read_trace

TRACES = Path(__file__).parents[3].parent / "shared" / "traces"
CASES = [
    ("edited_lastn5-sweagent.jsonl.gz", ("tool", "user"), 18),
    ("edited_window20-openhands.jsonl.gz", ("tool", "assistant", "user"), 14),
    ("edited_mask10-mini.jsonl.gz", ("tool",), 40),
]
ONE_EACH_COMMIT = [
    CASES[0],
    *(pytest.param(*case, marks=pytest.mark.nightly) for case in CASES[1:]),
]

pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason="the recordings are not here")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cheaper model than the default: tokens are counted here, and its tokenizer is the same."""
    folder = tmp_path_factory.mktemp("models") / "random"
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32}
    return str(build_random(RandomKind.LLAMA, folder, **small))


def run(model: str, name: str, roles: tuple[str, ...], limit: int | None) -> ReplayReport:
    """Radix and splice on the first ``limit`` requests of a recording."""
    undeclared = dict.fromkeys(roles, "amortize")
    options = StackOptions(policy="keep_all", undeclared=undeclared, model=model)
    trace = read_trace(TRACES / name).first(limit)
    return replay(trace, (Arm.RADIX, Arm.SPLICE), options, lambda arm, done: None)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "roles", "limit"), ONE_EACH_COMMIT)
def test_splice_reuses_what_is_unchanged(
    model: str, name: str, roles: tuple[str, ...], limit: int
) -> None:
    """With the harness's roles mapped, at least 99 % of the unchanged tokens are reused."""
    report = run(model, name, roles, limit)
    ratio = report.reuse_of_unchanged(Arm.SPLICE)
    assert ratio is not None and ratio >= 0.99
    assert report.summary(Arm.SPLICE).spliced_tokens > 0
    assert not report.runs[Arm.SPLICE].notes


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "roles", "limit"), CASES)
def test_nothing_is_spliced_unasked(
    model: str, name: str, roles: tuple[str, ...], limit: int
) -> None:
    """Without the option, splice equals radix on every request."""
    report = run(model, name, (), limit)
    radix, splice = report.runs[Arm.RADIX].results, report.runs[Arm.SPLICE].results
    assert [(r.cached, r.spliced) for r in radix] == [(s.cached, s.spliced) for s in splice]
