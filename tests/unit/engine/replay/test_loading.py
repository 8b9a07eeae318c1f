"""Loading models: from a folder, by name, and what is said when it fails; the chat template."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from leyline_lab.stand_ins.random_models import RandomKind, build_model, build_random, random_config
from leyline_replay.models.loader import ModelLoadError, load_model

TOOLS = [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}]
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": " b\n"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "ls", "arguments": '{"p":1}'}},
            {"id": "2", "type": "function", "function": {"name": "ls", "arguments": {"p": 2}}},
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "  out\n"},
    {"role": "assistant", "content": " done <b> "},
    {"role": "user", "content": "thanks"},
]


def test_two_builds_are_one_model(tmp_path: Path) -> None:
    """Equal weights in two folders have one fingerprint; other weights have another."""
    folders = [build_random(RandomKind.MLA, tmp_path / name) for name in ("first", "second")]
    folders.append(build_random(RandomKind.MLA, tmp_path / "other", seed=1))
    first, second, other = (load_model(str(folder), device="cpu") for folder in folders)
    assert first.fingerprint == second.fingerprint != other.fingerprint
    assert (first.name, second.name) == ("first", "second")


@pytest.mark.parametrize("kind", list(RandomKind))
def test_every_kind_loads_and_depends_on_the_prompt(kind: RandomKind, tmp_path: Path) -> None:
    """Each architecture loads from its folder and its answer depends on the first token."""
    folder = build_random(kind, tmp_path / kind.value)
    loaded = load_model(str(folder), dtype="float32", device="cpu")
    prompt = torch.arange(100, 140)[None]
    other = prompt.clone()
    other[0, 0] = 99
    with torch.inference_mode():
        first, second = (loaded.model(ids).logits[0, -1] for ids in (prompt, other))
    assert loaded.name == kind.value
    assert (first - second).abs().max() > 0.05
    gap = first.topk(2).values
    assert gap[0] - gap[1] > 1e-3


def test_weights_depend_on_the_seed_only() -> None:
    """The caller's random state neither matters nor changes."""
    config = random_config(RandomKind.LLAMA)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = build_model(config, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    second, third = build_model(config, seed=5), build_model(config, seed=6)
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, third.lm_head.weight)


def test_template_is_append_only_and_verbatim() -> None:
    """A longer conversation extends a shorter one's text, and contents aren't touched."""
    tokenizer = load_model(device="cpu").tokenizer
    texts = [
        tokenizer.apply_chat_template(CONVERSATION[:end], tools=TOOLS, tokenize=False)
        for end in range(1, len(CONVERSATION) + 1)
    ]
    for shorter, longer in pairwise(texts):
        assert longer.startswith(shorter)
    whole = texts[-1]
    for part in (
        " Be brief. ",
        "a b\n<|im_end|>",
        '"arguments": {"p":1}}',
        "  out\n",
        " done <b> ",
    ):
        assert part in whole
    assert json.dumps(TOOLS[0]) in whole
    ids = tokenizer.apply_chat_template(CONVERSATION, tools=TOOLS)["input_ids"]
    assert tokenizer.decode(ids) == whole
    opened = tokenizer.apply_chat_template(
        CONVERSATION, tools=TOOLS, tokenize=False, add_generation_prompt=True
    )
    assert opened == whole + "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"path_or_id": "./missing"}, "no folder"),
        ({"path_or_id": "not a hub id!"}, "neither a folder nor a hub id"),
        ({"path_or_id": "acme/unreachable"}, "can't be fetched.*one that ships: leyline-recall"),
        ({"path_or_id": None, "dtype": "int3"}, "dtype 'int3' is unknown"),
        ({"path_or_id": None, "device": "warp"}, "device 'warp'"),
    ],
)
def test_load_errors_say_what_to_change(arguments: dict[str, Any], expected: str) -> None:
    """Anything that can't be loaded gives one clear error."""
    with pytest.raises(ModelLoadError, match=expected):
        load_model(**{"device": "cpu", **arguments})


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    """An existing folder that holds no model gives the same clear error."""
    with pytest.raises(ModelLoadError, match="holds no usable"):
        load_model(str(tmp_path), device="cpu")
