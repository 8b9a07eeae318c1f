"""The digest of a loaded model, by which KV of different models is kept apart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

import torch

_SAMPLED_BYTES = 1 << 16
_VOLATILE = frozenset({"_name_or_path", "transformers_version"})
"""Keys of a configuration that don't affect the model."""


def model_fingerprint(
    model: torch.nn.Module,
    configuration: Mapping[str, object],
    path: str,
    settings: tuple[object, ...],
) -> str:
    """Return a digest of a model whose KV must not mix with others', 32 hex digits.

    It covers configuration, settings, names, sizes and ends of the weight files, and the norms'
    weights, which every tensor-parallel rank holds whole: the ranks agree.

    Args:
        model: the model as loaded on this rank.
        configuration: the model's configuration; the place it was loaded from doesn't count.
        path: folder or hub id that it was loaded from.
        settings: other settings that change the KV: revision, load format, quantisation, dtype.
    """
    state = blake2b(digest_size=16)
    kept = {key: value for key, value in configuration.items() if key not in _VOLATILE}
    text = json.dumps(kept, sort_keys=True, default=str)
    state.update(f"{text};{settings!r};".encode())
    files = sorted(Path(path).glob("*.safetensors"))
    state.update(b"" if files else path.encode())
    for file in files:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - _SAMPLED_BYTES))
            state.update(f"{file.name}:{size};".encode() + stream.read())
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and "norm" in name:
            values = parameter.detach().to("cpu", torch.float32)
            state.update(name.encode() + values.numpy().tobytes())
    return state.hexdigest()
