"""``leyline eval --engine sglang``: a real server with the control, and figures of both engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.sglang_stack import API_KEY, HINTS_SECRET, PYTHON, SglangServer
from support.waiting import wait
from typer.testing import CliRunner

from leyline_lab.engines.sglang import PYTHON_VARIABLE
from leyline_lab.evaluation.sessions import evaluation_sessions
from leyline_lab.fidelity import tables
from leyline_lab.fidelity.experiment import Experiment, Scale
from leyline_lab.fidelity.replay_subject import ReplaySubject
from leyline_lab.fidelity.single_prompt import SinglePrompt
from leyline_lab.fidelity.tables import RECALL_MODELS
from leyline_proxy.cli.main import build_app
from leyline_replay.models.loader import load_model

needs_sglang = pytest.mark.skipif(
    not PYTHON.is_file(), reason="SGLang isn't installed here: make sglang-setup"
)

_HOLD = """
from pathlib import Path
from sys import argv
from leyline_lab.engines.sglang import evaluation_server
with evaluation_server(None, Path(argv[1])):
    pass
"""


class Few(SinglePrompt):
    """Two of the prompts, whose outputs are hidden and repeated."""

    def cases(self, scale: Scale) -> Sequence[str]:
        """Their names."""
        return [f"leyline-recall/{kind}/0" for kind in ("silent", "restated")]


def few(subjects: Sequence[Any], *_: object) -> tuple[Experiment, ...]:
    """The experiment alone."""
    return (Few(subjects, RECALL_MODELS, evaluation_sessions().recorded[11]),)


def shown(table: dict[str, Any]) -> dict[tuple[str, str, str], dict[str, float | None]]:
    """Cells by model, kind and arm, without distances, which are of logits or of probabilities."""
    columns = table["columns"]
    return {
        tuple(row[:3]): {
            name: value
            for name, value in zip(columns[3:], row[3:], strict=True)
            if not name.startswith("L2")
        }
        for row in table["rows"]
    }


def children(pid: int) -> list[int]:
    """Processes that a process started, and that run."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = status.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(status.parent.name))
    return found


def runs(pid: int, module: str) -> bool:
    """True if a process runs a module."""
    try:
        return module in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


@pytest.mark.nightly
def test_a_running_sglang_is_measured_without_control(
    engine: SglangServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its key and its secret; the arm is missing, and the splice is the other engine's."""
    monkeypatch.setenv("LEYLINE_HINTS_SECRET", HINTS_SECRET)
    monkeypatch.setattr(tables, "answer_tables", few)
    out = tmp_path / "r.json"
    to = ["--engine", engine.base_url, "--api-key", API_KEY, "--quick", "--json", str(out)]
    result = CliRunner().invoke(build_app(), ["eval", *to])
    assert result.exit_code == 0, result.output
    table = json.loads(out.read_text())["tables"]["single_prompt"]
    check_equal(shown(table), {"no rotation"})


def check_equal(found: dict[tuple[str, str, str], Any], missing: set[str]) -> None:
    """The cells are those of the replay engine in this process, but for rounding."""
    (local,) = few([ReplaySubject(load_model("leyline-recall", device="cpu"), 16)])
    expected = local.table({case: local.measure(case) for case in local.cases(Scale.QUICK)})
    wanted = shown({"columns": expected.columns, "rows": expected.rows})
    assert found.keys() == {key for key in wanted if key[2] not in missing}
    for key, cells in found.items():
        for name, value in cells.items():
            other = wanted[key][name]
            assert value == (other and pytest.approx(other, rel=1e-3, abs=1e-4)), (key, name)
    splice, naive = (
        wanted["leyline-recall", "restated", arm]["KL full"] for arm in ("splice", "no rotation")
    )
    assert splice is not None and naive is not None and naive > 10 * splice


@pytest.mark.nightly
@needs_sglang
def test_sglang_has_the_replay_engine_s_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every arm of a real server, the control included, agrees with the other engine's to the last
    answer and to rounding; and nothing of the server is left."""
    monkeypatch.setenv(PYTHON_VARIABLE, str(PYTHON))
    monkeypatch.setattr(tables, "answer_tables", few)
    before = children(os.getpid())
    out = tmp_path / "r.json"
    result = CliRunner().invoke(
        build_app(), ["eval", "--engine", "sglang", "--quick", "--json", str(out)]
    )
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert document["engine"].startswith("sglang over HTTP") and len(document["notes"]) == 1
    check_equal(shown(document["tables"]["single_prompt"]), set())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json"]
    assert children(os.getpid()) == before


@pytest.mark.nightly
@needs_sglang
def test_a_server_ends_with_a_command_that_is_killed(tmp_path: Path) -> None:
    """Even SIGKILL of the command, which it can't handle, leaves no server."""
    command = [sys.executable, "-c", _HOLD, str(tmp_path / "log")]
    holder = subprocess.Popen(command, env=os.environ | {PYTHON_VARIABLE: str(PYTHON)})

    def servers() -> list[int]:
        return [each for each in children(holder.pid) if runs(each, "sglang.launch_server")]

    try:
        wait(servers, 60)
        (server,) = servers()
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    wait(lambda: not runs(server, "sglang.launch_server"), 60)
