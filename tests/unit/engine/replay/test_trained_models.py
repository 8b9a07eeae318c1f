"""The models that ship: what they are, and that their answers mean something."""

from __future__ import annotations

import pytest
import torch

from leyline_lab.fidelity.comparison import (
    FULL,
    NAIVE,
    REPREFILL,
    SPLICE,
)
from leyline_lab.fidelity.experiment import SessionStep
from leyline_lab.fidelity.recall_task import Note
from leyline_lab.fidelity.replay_subject import ReplaySubject
from leyline_lab.fidelity.single_prompt import SinglePrompt
from leyline_replay.models.loader import LoadedModel, load_model
from leyline_replay.models.tiny_chat_template import CHAT_TEMPLATE, THINKING_CHAT_TEMPLATE
from leyline_replay.models.trained import TRAINED_MODEL_NAMES, trained_model_dir

ANSWER_TOKENS = 24  # the longest right answer, a look-up, has 18
ARMS = (FULL, REPREFILL, SPLICE, NAIVE)


@pytest.fixture(scope="module")
def plain() -> LoadedModel:
    """The model without notes."""
    return load_model("leyline-recall", device="cpu")


def test_the_plain_model_is_found_by_name(plain: LoadedModel) -> None:
    """It is served under its name and computed with in fp32."""
    assert plain.name == "leyline-recall"
    assert plain.model.dtype is torch.float32


def test_the_plain_model_is_the_default(plain: LoadedModel) -> None:
    """Without a name, the same model is loaded under the same name."""
    default = load_model(device="cpu")
    assert (default.name, default.fingerprint) == (plain.name, plain.fingerprint)


def test_the_notes_model_is_found_by_name(plain: LoadedModel) -> None:
    """It has weights of its own and the same tokenizer and template."""
    notes = load_model("leyline-recall-notes", device="cpu")
    assert notes.name == "leyline-recall-notes"
    assert notes.fingerprint != plain.fingerprint
    texts = [m.tokenizer.backend_tokenizer.to_str() for m in (plain, notes)]
    assert texts[0] == texts[1]
    assert plain.tokenizer.chat_template == notes.tokenizer.chat_template


def test_the_thinking_model_is_found_by_name(plain: LoadedModel) -> None:
    """It has weights and a template of its own, and the same tokenizer."""
    thinking = load_model("leyline-recall-thinking", device="cpu")
    assert thinking.name == "leyline-recall-thinking"
    assert thinking.fingerprint != plain.fingerprint
    texts = [m.tokenizer.backend_tokenizer.to_str() for m in (plain, thinking)]
    assert texts[0] == texts[1]
    assert thinking.tokenizer.chat_template == THINKING_CHAT_TEMPLATE
    assert plain.tokenizer.chat_template == CHAT_TEMPLATE


def test_weights_are_small_enough_to_ship() -> None:
    """Each model's weights take at most 4 MB."""
    folders = [trained_model_dir(name) for name in TRAINED_MODEL_NAMES]
    sizes = [(folder / "model.safetensors").stat().st_size for folder in folders if folder]
    assert len(sizes) == 3 and max(sizes) <= 4_000_000


@pytest.mark.parametrize("name", TRAINED_MODEL_NAMES)
def test_models_ship_with_card_and_record(name: str) -> None:
    """Data, seeds and the loss curve lie beside the weights."""
    folder = trained_model_dir(name)
    assert folder is not None
    for file in ("README.md", "training.json", "loss.svg", "config.json", "tokenizer.json"):
        assert (folder / file).stat().st_size > 0, file


def test_other_names_are_no_shipped_models() -> None:
    """A name that isn't listed is looked for elsewhere."""
    assert trained_model_dir("leyline-huge") is None


def test_answers_over_the_whole_history_are_right(plain: LoadedModel) -> None:
    """The plain model answers what it has read, and only luck answers without the value."""
    experiment = SinglePrompt(
        [ReplaySubject(plain, ANSWER_TOKENS)], TRAINED_MODEL_NAMES, SessionStep((), ())
    )
    cases = [f"{plain.name}/{Note.KEYS}/{number}" for number in range(12)]
    records = {case: experiment.measure(case) for case in cases}
    table = experiment.table(records)
    right = {arm: sum(int(each[f"right|{arm}"] or 0) for each in records.values()) for arm in ARMS}
    assert right[FULL] >= 11
    assert right[REPREFILL] <= 1
    assert right[NAIVE] <= min(right[SPLICE], 1)
    assert sum(int(each["differ"] or 0) for each in records.values()) >= 11
    shares = [
        row[table.columns.index(f"then: {of}")]
        for row in table.rows
        if row[table.columns.index("arm")] == SPLICE
        for of in (FULL, REPREFILL, "neither")
    ]
    assert sum(float(share or 0) for share in shares) == pytest.approx(1, abs=1e-3)
    assert "the output's last line" in table.finding
