"""``leyline eval``: a report of a user's model, and errors in one line that say what to do."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from transformers import AutoConfig
from typer.testing import CliRunner

from leyline_lab.evaluation import (
    endpoint,
    running,
    sessions,
)
from leyline_lab.evaluation.composed import Composed
from leyline_lab.evaluation.recalled import RecallOfCut
from leyline_lab.fidelity.experiment import EvaluationSessions
from leyline_lab.fidelity.recall_prompts import long_session
from leyline_lab.fidelity.replay_eval import ReplayEvaluation
from leyline_lab.stand_ins.random_models import RandomKind, build_random
from leyline_policies import load_pipeline
from leyline_proxy.cli.main import build_app

ANSWERS = {"single_prompt", "trajectory_12", "random_edits", "trajectory_50", "stubs"}
"""Tables that compare a model's answers by arm."""
TABLES = ANSWERS | {
    *("boundary_recompute", "composed", "recall", "stripped_thinking", "kept_state"),
    *("removal", "rotary_sweep", "chained_rotations", "storage_floor"),
}
RUN = Callable[..., Result]


@pytest.fixture
def short_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions of a few steps in place of the demo's."""
    policies = load_pipeline("truncate_older_than:n=2,max_chars=40")
    steps = tuple(sessions._step(policies, messages, ()) for messages in long_session(13))
    found = EvaluationSessions(steps, steps)
    monkeypatch.setattr(sessions, "evaluation_sessions", lambda: found)
    monkeypatch.setattr(running, "Composed", partial(Composed, sessions=1, turns=4))
    monkeypatch.setattr(running, "RecallOfCut", partial(RecallOfCut, sessions=1, turns=4))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as a user has it."""
    return build_random(RandomKind.LLAMA, tmp_path_factory.mktemp("model"))


def invoke(*arguments: object) -> Result:
    """The command's result."""
    return CliRunner().invoke(build_app(), ["eval", *map(str, arguments)])


def said(result: Result) -> str:
    """The one line of an error."""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return str(lines[0])


@pytest.mark.nightly
@pytest.mark.usefixtures("short_sessions")
def test_a_user_s_model_gets_all_tables(model: Path, tmp_path: Path) -> None:
    """Every table has rows of its model, a finding, the paper's figures and the control."""
    out, html = tmp_path / "out" / "r.json", tmp_path / "out" / "r.html"
    result = invoke("--model", model, "--quick", "--json", out, "--html", html)
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert (document["engine"], document["model"]) == ("replay", model.name)
    assert (document["scale"], len(document["model_fingerprint"])) == ("quick", 32)
    assert set(document["tables"]) == TABLES
    for name, table in document["tables"].items():
        if name in ANSWERS:
            assert {row[0] for row in table["rows"]} == {model.name}
            assert "control without rotation is farther off" in table["finding"]
            assert table["paper"] and table["chart"]
        if name in ("boundary_recompute", "composed", "recall"):
            assert {row[0] for row in table["rows"]} == {model.name}
        if name == "stripped_thinking":
            assert not table["rows"] and f"strips no thinking: {model.name}." in table["finding"]
        assert table["title"] in result.stdout and table["title"] in html.read_text()
    assert document["profiles"] == []
    assert sorted(path.name for path in out.parent.iterdir()) == ["r.html", "r.json"]


def test_one_table_can_be_measured_alone(model: Path, tmp_path: Path) -> None:
    """Others are absent, and an unknown one is named with those that exist."""
    out = tmp_path / "r.json"
    chosen = "rotary_sweep, chained_rotations"
    result = invoke("--model", model, "--quick", "--json", out, "--tables", chosen)
    assert result.exit_code == 0, result.output
    tables = json.loads(out.read_text())["tables"]
    assert set(tables) == {"rotary_sweep", "chained_rotations"}
    wrong = invoke("--model", model, "--quick", "--json", out, "--tables", "rotations")
    assert wrong.exit_code == 2
    assert "no table rotations" in said(wrong) and "chained_rotations" in said(wrong)


@pytest.mark.usefixtures("short_sessions")
def test_an_interruption_says_how_to_continue(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C leaves the journal, and the status is the shell's for it."""
    out = tmp_path / "r.json"
    real = ReplayEvaluation.experiments

    def interrupted(self: ReplayEvaluation) -> Any:
        single = real(self)[0]
        measure = single.measure

        def once(case: str) -> Any:
            if case == single.cases(self._scale)[1]:
                raise KeyboardInterrupt
            return measure(case)

        monkeypatch.setattr(single, "measure", once)
        return [single]

    monkeypatch.setattr(ReplayEvaluation, "experiments", interrupted)
    result = invoke("--model", model, "--quick", "--json", out)
    assert result.exit_code == 130
    assert "same command again" in said(result)
    assert not out.exists()
    assert len((tmp_path / "r.json.journal").read_text().splitlines()) == 2


def no_tokenizer(folder: Path) -> None:
    """A folder with weights alone."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


def no_template(folder: Path) -> None:
    """A base model's folder."""
    (folder / "chat_template.jinja").unlink()


def refusing_template(folder: Path) -> None:
    """A template that takes no tool messages."""
    refusing = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
    (folder / "chat_template.jinja").write_text(refusing + "{% endif %}{% endfor %}")


def unknown_kind(folder: Path) -> None:
    """A model whose keys aren't rotated."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "unheard_of"}))


@pytest.mark.usefixtures("short_sessions")
@pytest.mark.parametrize(
    ("damage", "names"),
    [
        (no_tokenizer, "tokenizer"),
        (no_template, "has no chat template"),
        (refusing_template, "no tools"),
        (unknown_kind, "unheard_of"),
    ],
)
def test_a_model_that_cannot_be_measured_is_named(
    damage: Callable[[Path], None], names: str, tmp_path: Path
) -> None:
    """One line, status 2, and no report."""
    folder = build_random(RandomKind.LLAMA, tmp_path / "model")
    damage(folder)
    result = invoke("--model", folder, "--quick", "--json", tmp_path / "r.json")
    assert result.exit_code == 2, result.output
    assert names in said(result)
    assert not (tmp_path / "r.json").exists()


@pytest.mark.usefixtures("short_sessions")
def test_a_model_that_cannot_be_spliced_is_named(tmp_path: Path) -> None:
    """A model outside the allow-list says why."""
    folder = build_random(RandomKind.LLAMA, tmp_path / "model")
    config = AutoConfig.from_pretrained(folder)
    config.rope_parameters = {
        "rope_type": "dynamic",
        "rope_theta": 10000.0,
        "factor": 2.0,
    }
    config.save_pretrained(folder)
    result = invoke("--model", folder, "--quick", "--json", tmp_path / "r.json")
    assert result.exit_code == 2, result.output
    assert "can't be spliced: " in said(result) and "dynamic" in said(result)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--engine", "sglang", "--json", "r.json"], "--engine URL"),
        (["--engine", "vllm", "--json", "r.json"], "give replay, sglang, or the address"),
        (["--engine", "http://gpu1:30000?key=KEY", "--json", "r.json"], "gpu1:30000: give"),
        (["--engine", "http://KEY@gpu1:30000", "--json", "r.json"], "--engine gpu1:30000: give"),
        (
            ["--engine", "http://127.0.0.1:1", "--model", "./nowhere", "--json", "r.json"],
            "can't be reached",
        ),
        (["--json", "."], "is a folder"),
        (["--json", "same", "--html", "same"], "same file"),
        (["--model", "./nowhere", "--json", "r.json"], "./nowhere"),
        (["--model", "leyline-recall", "--json", "/dev/null/r.json"], "/dev/null"),
        (["--json", "r.json", "--html", "/dev/null/r.html"], "/dev/null"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_measured(
    arguments: list[str], names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, status 2."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LEYLINE_SGLANG_PYTHON", raising=False)
    monkeypatch.setattr(endpoint, "PAUSES_S", ())
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert names in said(result) and "KEY" not in result.output
    assert not list(tmp_path.iterdir())


def test_an_installation_without_the_engine_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The missing package is named, and the command that installs it."""
    monkeypatch.delitem(sys.modules, "leyline_lab.fidelity.replay_eval", raising=False)
    monkeypatch.setitem(sys.modules, "leyline_replay.models.loader", None)
    result = invoke("--json", tmp_path / "r.json")
    assert result.exit_code == 2
    assert "leyline_replay" in said(result) and "pip install" in said(result)


def test_the_sessions_are_as_long_as_the_paper_s() -> None:
    """The long one has 50 steps with one edit and with several; the short one's 12 have edits."""
    found = sessions.evaluation_sessions()
    assert len(found.recall) == 50 and len(found.recorded) >= 12
    assert {min(step.edits, 2) for step in found.recall} == {0, 1, 2}
    assert sum(step.edits > 0 for step in found.recorded[:12]) >= 6


@pytest.mark.nightly
def test_the_shipped_models_are_measured(tmp_path: Path) -> None:
    """Without a model, five are, and the control looks bad for each of them in every table."""
    out = tmp_path / "r.json"
    assert invoke("--quick", "--json", out).exit_code == 0
    document = json.loads(out.read_text())
    assert document["model"].split(", ") == [
        "leyline-recall",
        "leyline-recall-notes",
        "leyline-recall-thinking",
        "random-mla",
        "random-gqa",
    ]
    for name in ANSWERS:
        table = document["tables"][name]
        overall, *models = table["finding"].splitlines()
        assert "as it must be" in overall, table["finding"]
        assert sum("is farther off" in line for line in models) == 5, table["finding"]
    thinking = document["tables"]["stripped_thinking"]
    assert {row[0] for row in thinking["rows"]} == {"leyline-recall-thinking"}
    assert "no logit differs" in document["tables"]["removal"]["finding"]
