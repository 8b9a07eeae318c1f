"""The loader of a causal language model and its tokenizer."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from leyline_replay.models.trained import DEFAULT_MODEL_NAME, TRAINED_MODEL_NAMES, trained_model_dir

log = logging.getLogger(__name__)

_DTYPES: dict[str, torch.dtype | str] = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_SAMPLED_TENSORS = 4
_SAMPLED_VALUES = 4096


class ModelLoadError(RuntimeError):
    """The model can't be loaded; the message says what to change."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and the facts that identify it."""

    name: str
    """Name under which it is served."""
    model: PreTrainedModel
    """The model in eval mode, without gradients."""
    tokenizer: PreTrainedTokenizerFast
    fingerprint: str
    """Digest over configuration, weight files and samples of the weights; 32 hex digits."""
    path: str
    """The folder from which it was loaded."""


def load_model(
    path_or_id: str | None = None, *, dtype: str = "auto", device: str = "auto"
) -> LoadedModel:
    """Load a model that ships with the package, or from a folder or the Hugging Face hub.

    Args:
        path_or_id: one of ``TRAINED_MODEL_NAMES``, a folder, or a hub id; None for
            ``DEFAULT_MODEL_NAME``.
        dtype: ``auto`` (the configuration's), ``float32``, ``bfloat16`` or ``float16``.
        device: ``auto`` (the first GPU, else the CPU) or a torch device.

    Raises:
        ModelLoadError: the folder, hub id, dtype or device can't be used.
    """
    torch_dtype = _DTYPES.get(dtype)
    if torch_dtype is None:
        raise ModelLoadError(f"dtype {dtype!r} is unknown; use one of {', '.join(_DTYPES)}")
    target = _device(device)
    wanted = DEFAULT_MODEL_NAME if path_or_id is None else path_or_id
    folder = _resolve(wanted)
    transformers_logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch_dtype)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelLoadError(f"{folder} holds no usable causal language model: {error}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise ModelLoadError(f"{folder} has no tokenizer.json; a fast tokenizer is needed")
    model.requires_grad_(False)
    model = model.to(target).eval()
    fingerprint = model_fingerprint(model, folder)
    return LoadedModel(_served_name(wanted), model, tokenizer, fingerprint, str(folder))


def model_fingerprint(model: Any, folder: Path) -> str:
    """Return a digest of a model whose cached KV must not mix with others', 32 hex digits.

    It covers the configuration, names and sizes of the weight files, dtype, and samples of the
    first and last parameters.
    """
    state = blake2b(digest_size=16)
    config = folder / "config.json"
    state.update(config.read_bytes() if config.is_file() else b"")
    for file in sorted(folder.glob("*.safetensors")):
        state.update(f"{file.name}:{file.stat().st_size};".encode())
    parameters = list(model.named_parameters())
    for name, parameter in (*parameters[:_SAMPLED_TENSORS], *parameters[-_SAMPLED_TENSORS:]):
        sample = parameter.detach().flatten()[:_SAMPLED_VALUES].to("cpu", torch.float32)
        state.update(f"{name}:{tuple(parameter.shape)}:{parameter.dtype};".encode())
        state.update(sample.numpy().tobytes())
    return state.hexdigest()


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelLoadError(f"device {name!r} can't be used: {error}") from error
    return device


def _resolve(path_or_id: str) -> Path:
    if (shipped := trained_model_dir(path_or_id)) is not None:
        return shipped
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    if path.exists() or path_or_id.startswith((".", "/", "~")):
        raise ModelLoadError(f"{path_or_id} is no folder with a model")
    try:
        return Path(snapshot_download(path_or_id, allow_patterns=list(_MODEL_FILES)))
    except HFValidationError as error:
        raise ModelLoadError(f"{path_or_id!r} is neither a folder nor a hub id") from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelLoadError(
            f"{path_or_id!r} is no local folder and can't be fetched from the hub "
            f"({type(error).__name__}). Check the id and the network, give the path of a "
            f"downloaded model, or name one that ships: {', '.join(TRAINED_MODEL_NAMES)}."
        ) from error


def _served_name(path_or_id: str) -> str:
    if path_or_id in TRAINED_MODEL_NAMES:
        return path_or_id
    path = Path(path_or_id).expanduser()
    return path.resolve().name if path.is_dir() else path_or_id
