"""Replaces torchvision if no build matches the CPU build of PyTorch.

SGLang imports torchvision at module level from a few multimodal processors, which a server of text
models loads and never calls. Every name resolves; every call raises.
"""

from __future__ import annotations

import enum
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any, NoReturn

__version__ = "0.0.0"


def _unavailable(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("torchvision is not installed here: this SGLang serves text models only")


class _Unavailable:
    __init__ = _unavailable


class _InterpolationMode(enum.Enum):
    """Members that processors name as default arguments."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Module(types.ModuleType):
    """A module in which every public name exists: classes by a capital, else functions."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "InterpolationMode":
            return _InterpolationMode
        return type(name, (_Unavailable,), {}) if name[:1].isupper() else _unavailable


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule of torchvision."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing."""


sys.meta_path.insert(0, _Finder())
sys.modules[__name__].__class__ = _Module
