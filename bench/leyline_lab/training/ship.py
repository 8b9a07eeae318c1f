"""Make a trained model ready to ship: half the bytes, evaluated, with a model card.

``python bench/leyline_lab/training/ship.py --help``
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from leyline_lab.training.card import draw_curve, model_card
from leyline_lab.training.evaluate import evaluate
from leyline_lab.training.train import RECIPES
from leyline_replay.models.tiny import add_sglang_keys

_EVALUATION_SEED = 7


def ship(trained: Path, out: Path, name: str) -> None:
    """Write the folder for the package.

    The weights are stored as fp16 and used as fp32. Rounding changes hardly any answer, and the
    evaluation uses the rounded ones.

    Args:
        trained: output folder of ``train.py``.
        out: created if missing; files of an earlier run are overwritten.
        name: the recipe's name.
    """
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(trained)
    model = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    add_sglang_keys(out / "config.json")
    weights = out / "model.safetensors"
    halved = {key: tensor.half() for key, tensor in load_file(weights).items()}
    save_file(halved, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    record = json.loads((trained / "training.json").read_text(encoding="utf-8"))
    record["evaluation"] = measure(out, name)
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    draw_curve(record["curve"], out / "loss.svg")
    card = model_card(name, record, parameters=sum(p.numel() for p in model.parameters()))
    (out / "README.md").write_text(card, encoding="utf-8")


def measure(folder: Path, name: str) -> dict[str, Any]:
    """Return the rates of right answers; over hidden outputs or thoughts, too, if trained on."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    mixes = {"in_sight": RECIPES["plain"].stages[-1].mix}
    own = RECIPES[name].stages[-1].mix
    if own.hidden:
        mixes["hidden"] = own
    if own.choices:
        mixes["thinking"] = own
    return {
        key: evaluate(model, tokenizer, mix, seed=_EVALUATION_SEED) for key, mix in mixes.items()
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", choices=sorted(RECIPES))
    parser.add_argument("--trained", type=Path, required=True, help="what train.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="the folder to ship")
    options = parser.parse_args()
    ship(options.trained, options.out, options.recipe)


if __name__ == "__main__":
    main()
