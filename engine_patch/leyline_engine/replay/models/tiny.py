"""Tiny deterministic models with a real tokenizer, made in seconds on any machine.

They exist so that the engine runs without a download or a GPU, and as subjects of tests. Their
weights are random: an answer means nothing, but it depends on every token of the prompt.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import tokenizers
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from leyline_engine.replay.models.tiny_chat_template import (
    CHAT_TEMPLATE,
    TOOL_CALL_CLOSE,
    TOOL_CALL_OPEN,
)

TINY_MODEL_NAME = "leyline-tiny"
RECIPE_VERSION = 1
VOCAB_SIZE = 8192
MAX_CONTEXT = 131072
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
_TRAINING_BYTES = 3_000_000
_SEED = 20250


class TinyKind(StrEnum):
    """The architectures that :func:`build_tiny` makes."""

    MLA = "mla"
    """DeepSeek-V2 with dense layers: latent KV, interleaved rotary pairs."""
    MLA_YARN = "mla_yarn"
    """The same under YaRN scaling with an mscale that isn't 1."""
    MLA_V3 = "mla_v3"
    """DeepSeek-V3 with dense layers."""
    LLAMA = "llama"
    QWEN3 = "qwen3"


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/leyline``, else ``~/.cache/leyline``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "leyline"


def tiny_model_dir(cache_dir: Path, kind: TinyKind = TinyKind.MLA) -> Path:
    """The folder of a tiny model under ``cache_dir``; built when it isn't there yet.

    Two processes may race: each builds in a folder of its own, and the first rename wins.
    """
    target = cache_dir / "models" / f"tiny-{kind.value}-{_recipe_digest()}"
    return _build_once(target, lambda folder: build_tiny(kind, folder, cache_dir=cache_dir))


def build_tiny(
    kind: TinyKind | str, directory: Path, *, seed: int = _SEED, cache_dir: Path | None = None
) -> Path:
    """Write a tiny model with its tokenizer to ``directory``.

    Args:
        kind: architecture, see :class:`TinyKind`.
        directory: made when missing; files of an earlier build are overwritten.
        seed: of the weights.
        cache_dir: where the trained tokenizer is kept; the user's cache folder by default.

    Returns:
        ``directory``, loadable by transformers.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer_dir = _tokenizer_dir(cache_dir or default_cache_dir())
    for file in tokenizer_dir.iterdir():
        shutil.copyfile(file, directory / file.name)
    eos = Tokenizer.from_file(str(directory / "tokenizer.json")).token_to_id("<|im_end|>")
    config = tiny_config(kind, eos_token_id=eos or 0)
    build_model(config, seed=seed).save_pretrained(directory)
    add_sglang_keys(directory / "config.json")
    return directory


def build_model(config: PreTrainedConfig, *, seed: int = _SEED) -> Any:
    """An fp32 model of ``config`` whose weights depend only on ``seed``.

    The init is wider than usual, so that logits lie far from ties and attention matters.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                wide = "embed_tokens" in name or "lm_head" in name
                parameter.normal_(0.0, 0.5 if wide else 0.1, generator=generator)
            elif "norm" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(1 + 0.1 * noise)
    return model.eval()


def tiny_config(kind: TinyKind | str, *, eos_token_id: int = 2) -> PreTrainedConfig:
    """The configuration of a tiny model.

    Raises:
        ValueError: for an unknown kind.
    """
    base: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": MAX_CONTEXT,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": 3,
        "tie_word_embeddings": False,
    }
    return _CONFIGS[TinyKind(kind)](base)


_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    # As wide as a query head: PyTorch's fused CPU attention takes only equal widths.
    "v_head_dim": 64,
    "first_k_dense_replace": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": MAX_CONTEXT // 4,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 1.0,
}
_CONFIGS: dict[TinyKind, Callable[[dict[str, Any]], PreTrainedConfig]] = {
    TinyKind.MLA: lambda base: DeepseekV2Config(**base, **_MLA, topk_method="greedy"),
    TinyKind.MLA_YARN: lambda base: DeepseekV2Config(
        **base, **(_MLA | {"q_lora_rank": 48}), topk_method="greedy", rope_parameters=_YARN
    ),
    TinyKind.MLA_V3: lambda base: DeepseekV3Config(
        **base, **(_MLA | {"q_lora_rank": 48}), rope_interleave=True
    ),
    TinyKind.LLAMA: lambda base: LlamaConfig(**base, num_key_value_heads=2, head_dim=32),
    TinyKind.QWEN3: lambda base: Qwen3Config(**base, num_key_value_heads=2, head_dim=32),
}


def _recipe_digest() -> str:
    """Names what a tiny model depends on: this recipe, the training text, the libraries."""
    parts = (RECIPE_VERSION, VOCAB_SIZE, _TRAINING_BYTES, _SEED, CHAT_TEMPLATE, sys.version)
    state = blake2b(digest_size=8)
    for part in (*parts, torch.__version__, tokenizers.__version__):
        state.update(f"{part}\0".encode())
    return state.hexdigest()


def _build_once(target: Path, build: Callable[[Path], object]) -> Path:
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        build(folder)
        folder.rename(target)
    except OSError:
        # Another process finished first: a rename onto a folder that isn't empty is refused.
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return target


def _tokenizer_dir(cache_dir: Path) -> Path:
    target = cache_dir / "models" / f"tiny-tokenizer-{_recipe_digest()}"
    return _build_once(target, lambda folder: _train_tokenizer().save_pretrained(folder))


def _training_text() -> Iterator[str]:
    """Source files of the standard library, in a fixed order, up to a byte budget."""
    remaining = _TRAINING_BYTES
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")[:remaining]
        remaining -= len(text)
        yield text
        if remaining <= 0:
            return


def _train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: any text survives encoding and decoding unchanged."""
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return train_bpe(pieces, _training_text(), vocab_size=VOCAB_SIZE, max_context=MAX_CONTEXT)


def train_bpe(
    pieces: PreTokenizer, texts: Iterable[str], *, vocab_size: int, max_context: int
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer for the tiny models' chat template.

    Args:
        pieces: cuts texts into what tokens never reach across; ends in bytes.
        texts: to train on.
        vocab_size: special tokens and tool tags included.
        max_context: tokens that the model takes.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pieces
    tokenizer.decoder = decoders.ByteLevel()
    tool_tags = [
        AddedToken(tag, special=False, normalized=False)
        for tag in (TOOL_CALL_OPEN, TOOL_CALL_CLOSE)
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(tool_tags),
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(tool_tags)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",  # noqa: S106 - a token of the vocabulary
        pad_token="<|pad|>",  # noqa: S106
        additional_special_tokens=["<|endoftext|>", "<|im_start|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=max_context,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def add_sglang_keys(config_file: Path) -> None:
    """SGLang reads keys of DeepSeek configurations that transformers 5 leaves out."""
    config = cast(dict[str, Any], json.loads(config_file.read_text(encoding="utf-8")))
    if config["model_type"] == "deepseek_v2":
        config |= {"moe_layer_freq": 1, "scoring_func": "softmax", "ep_size": 1, "seq_aux": True}
        config["aux_loss_alpha"] = 0.001
        config_file.write_text(json.dumps(config, indent=2), encoding="utf-8")
