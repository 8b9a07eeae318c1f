"""The models that ship: what they are, and that their answers mean something."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from leyline_engine.replay.models.loader import LoadedModel, load_model
from leyline_engine.replay.models.trained import TRAINED_MODEL_NAMES, trained_model_dir
from training.task import Note

BENCH = Path(__file__).resolve().parents[4] / "bench" / "single_prompt.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """The harness of the single-prompt test."""
    spec = importlib.util.spec_from_file_location("single_prompt", BENCH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


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


def test_weights_are_small_enough_to_ship() -> None:
    """Both models' weights take at most 8 MB together."""
    folders = [trained_model_dir(name) for name in TRAINED_MODEL_NAMES]
    sizes = [(folder / "model.safetensors").stat().st_size for folder in folders if folder]
    assert len(sizes) == 2 and sum(sizes) <= 8_000_000


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


def test_answers_over_the_whole_history_are_right(bench: ModuleType, plain: LoadedModel) -> None:
    """The single-prompt test runs all arms, and the plain model answers what it has read."""
    entry = bench.measure(plain, Note.KEYS, count=20, turns=2, step=lambda: None)
    assert entry["right"]["full"] >= 0.9
    assert entry["right"]["reprefill"] <= 0.1  # the value is nowhere: a right answer is luck
    assert entry["references_differ"] >= 18
    for arm in ("splice", "splice_asked"):
        shares = [entry[arm][f"first_{of}"] for of in ("full", "reprefill", "neither")]
        assert sum(shares) == pytest.approx(1, abs=1e-3)
