"""Commands that install missing packages, for hints to users.

Leyline is on no package index. By its bare name, pip would find nothing, or somebody else's
package. So hints name the folder or the wheel of this installation.
"""

from __future__ import annotations

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

PACKAGE = "leyline-kv"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Index of PyTorch's builds for CPUs. By default pip takes 5.7 GB of CUDA builds on Linux."""

_WITH_TORCH = frozenset({"engine"})


def pip_install(*extras: str) -> str:
    """Return the command that adds extras to this installation, for CPUs."""
    index = "" if _WITH_TORCH.isdisjoint(extras) else f"--extra-index-url {CPU_INDEX} "
    wanted = f"{_source()}[{','.join(extras)}]"
    return f"pip install {index}{shlex.quote(wanted)}"


def _source() -> str:
    """Return the folder or the wheel of this installation if it still exists, else the name of its
    wheel."""
    try:
        told = json.loads(distribution(PACKAGE).read_text("direct_url.json") or "null")
        place = urlsplit(told["url"])
    except (PackageNotFoundError, ValueError, TypeError, KeyError):
        return _wheel()
    path = Path(url2pathname(place.path))
    return str(path) if place.scheme == "file" and path.exists() else _wheel()


def _wheel() -> str:
    try:
        return f"leyline_kv-{version(PACKAGE)}-py3-none-any.whl"
    except PackageNotFoundError:
        return "."  # run from a source tree without its metadata
