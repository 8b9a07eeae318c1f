"""The probe: what is measured on a model, and which models are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.replay_engine import BASE, MLA, make_model
from transformers import (
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    GlmConfig,
    GPT2Config,
    GPTNeoXConfig,
    Llama4TextConfig,
    LlamaConfig,
    SmolLM3Config,
)

from leyline_engine.rotary.rotation import Pairing
from leyline_replay.models.rotary_probe import (
    SUPPORTED_DTYPES,
    UnsupportedModelError,
    read_model_facts,
)

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "mscale": 0.7,
    "mscale_all_dim": 0.3,
}
V3 = {key: value for key, value in MLA.items() if key != "topk_method"}


@pytest.mark.parametrize("dtype", sorted(SUPPORTED_DTYPES, key=str))
@pytest.mark.parametrize(
    ("config", "pairing", "tensor", "band"),
    [
        (LlamaConfig(**BASE, num_key_value_heads=1), Pairing.HALF_SPLIT, 0, (0, 16)),
        (CohereConfig(**BASE), Pairing.INTERLEAVED, 0, (0, 16)),
        (GPTNeoXConfig(**BASE), Pairing.HALF_SPLIT, 0, (0, 4)),
        (
            GlmConfig(**BASE, num_key_value_heads=1, head_dim=16),
            Pairing.INTERLEAVED,
            0,
            (0, 8),
        ),
        (DeepseekV2Config(**BASE, **MLA), Pairing.INTERLEAVED, 1, (0, 8)),
        (
            DeepseekV2Config(**BASE, **MLA, rope_parameters=YARN),
            Pairing.INTERLEAVED,
            1,
            (0, 8),
        ),
        (DeepseekV3Config(**BASE, **V3), Pairing.HALF_SPLIT, 1, (0, 8)),
    ],
    ids=["llama", "cohere", "neox", "glm", "v2", "v2-yarn", "v3"],
)
def test_facts_are_measured(
    config: Any, pairing: Pairing, tensor: int, band: tuple[int, int], dtype: torch.dtype
) -> None:
    """Pairing, tensor, band and width come from the model's own keys, in each dtype."""
    facts = read_model_facts(make_model(config).to(dtype))
    layout = facts.layout
    assert facts.unsupported == ""
    assert facts.rotary.pairing is pairing
    assert layout.rotary_tensor == tensor
    assert (layout.rotary_start, layout.rotary_dim) == band
    assert layout.dtype == dtype
    assert layout.layers == 2


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "dynamic"),
        (
            {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "factor": 2.0,
                "original_max_position_embeddings": 512,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
            },
            "longrope",
        ),
    ],
)
def test_rotary_types_that_change_with_length_are_refused(rope: Any, said: str) -> None:
    """A rotary whose frequencies depend on the length isn't spliced, and the reason names it."""
    model = make_model(LlamaConfig(**BASE, num_key_value_heads=1, rope_parameters=rope))
    assert said in read_model_facts(model).unsupported


def test_layers_without_rotation_are_told_from_the_others() -> None:
    """SmolLM3 turns the keys of every other layer only."""
    config = SmolLM3Config(**BASE, num_key_value_heads=1, no_rope_layer_interval=2)
    facts = read_model_facts(make_model(config))
    assert facts.unsupported == ""
    assert facts.facts is not None
    assert facts.facts.rope_type == "default+none"
    assert [bool(facts.rotary.at(layer).inv_freq.any()) for layer in (0, 1)] == [True, False]


def test_chunked_attention_is_refused() -> None:
    """Rows of Llama 4 see their own chunk alone, which moves with a splice."""
    config = Llama4TextConfig(
        **BASE,
        num_key_value_heads=1,
        head_dim=16,
        num_local_experts=2,
        intermediate_size_mlp=32,
        attention_chunk_size=16,
        no_rope_layers=[1, 1],
        attn_temperature_tuning=False,
    )
    assert "chunked_attention" in read_model_facts(make_model(config)).unsupported


def test_dtype_outside_the_list_is_refused() -> None:
    """fp64 KV is refused by name rather than failing the start."""
    model = make_model(LlamaConfig(**BASE, num_key_value_heads=1)).to(torch.float64)
    assert "float64" in read_model_facts(model).unsupported


def test_model_without_rotary_is_refused() -> None:
    """Learned positions can't be moved."""
    model = make_model(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2))
    with pytest.raises(UnsupportedModelError, match="no rotary"):
        read_model_facts(model)


def test_misread_rotary_is_noticed() -> None:
    """If the frequencies read aren't those that the keys turn by, splicing is off."""
    model = make_model(LlamaConfig(**BASE, num_key_value_heads=1))
    rotary = model.base_model.rotary_emb
    right = rotary.inv_freq.clone()

    base: Any = type(rotary)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        shown = self.inv_freq
        self.inv_freq = right * 1.5
        try:
            return base.forward(self, *args, **kwargs)
        finally:
            self.inv_freq = shown

    rotary.__class__ = type("Lying", (base,), {"forward": forward})
    assert "no one rotation" in read_model_facts(model).unsupported
