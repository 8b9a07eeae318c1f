"""Commands that install missing packages, for hints to users.

Leyline is on no package index. By a bare name, pip would find nothing, or somebody else's package.
So hints name the folders or the wheels of this installation.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution, requires, version
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

PACKAGE: Final = "leyline-kv"
REPLAY_ENGINE: Final = "leyline-replay"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Index of PyTorch's builds for CPUs. By default pip takes 5.7 GB of CUDA builds on Linux."""


class _Distribution(NamedTuple):
    """A distribution that an extra brings along."""

    name: str
    folder: str
    """Its folder in a checkout."""
    has_torch: bool


_TREE: Final = Path()
"""Stands for a source tree that runs without metadata."""
_BROUGHT: Final = {
    "engine": _Distribution(REPLAY_ENGINE, "engine_patch", has_torch=True),
    "lab": _Distribution("leyline-lab", "bench", has_torch=False),
}


def pip_install(*extras: str) -> str:
    """Return the command that adds extras to this installation, for CPUs.

    It names the distributions that ``engine`` and ``lab`` bring along.
    """
    source = _source()
    brought = [_BROUGHT[extra] for extra in extras if extra in _BROUGHT]
    own = [extra for extra in extras if extra not in _BROUGHT]
    wanted = [f"{source or _wheel(PACKAGE)}[{','.join(own)}]"] if own else []
    if not own and source == _TREE:
        wanted.append(str(_TREE))
    wanted += [_beside(source, each) for each in brought]
    index = ["--extra-index-url", CPU_INDEX] if any(each.has_torch for each in brought) else []
    return shlex.join(["pip", "install", *index, *wanted])


def command_for(module: str) -> str | None:
    """Return the command that installs what a missing module belongs to; None if unknown."""
    root = module.partition(".")[0]
    if root in ("leyline_replay", "torch", "transformers"):
        return pip_install("engine")
    if root == "leyline_lab":
        return pip_install("lab")
    return pip_install("proxy") if any(package_problems(PACKAGE, ["proxy"])) else None


def package_problems(name: str, extras: Sequence[str]) -> Iterator[str]:
    """Yield a distribution's requirements that the installed packages don't meet.

    Raises:
        PackageNotFoundError: the distribution itself isn't installed.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    for text in requires(name) or ():
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue
        marker = wanted.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        try:
            found = version(wanted.name)
        except PackageNotFoundError:
            yield f"{wanted.name} is missing"
            continue
        if not wanted.specifier.contains(found, prereleases=True):
            yield f"{wanted.name} {found} isn't {wanted.specifier}"


def _source() -> Path | None:
    """Return the folder or the wheel of this installation if it still exists."""
    from urllib.request import url2pathname  # brings an HTTP client along

    try:
        told = json.loads(distribution(PACKAGE).read_text("direct_url.json") or "null")
        place = urlsplit(told["url"])
    except PackageNotFoundError:
        return _TREE
    except (ValueError, TypeError, KeyError):
        return None
    path = Path(url2pathname(place.path))
    return path if place.scheme == "file" and path.exists() else None


def _beside(source: Path | None, wanted: _Distribution) -> str:
    """Return another distribution's folder or wheel beside this installation's if it exists, else
    the name of its wheel."""
    if source == _TREE:
        return f"./{wanted.folder}"  # without a slash, pip takes it for a package's name
    wheel = _wheel(wanted.name)
    if source is None:
        return wheel
    beside = source / wanted.folder if source.is_dir() else source.with_name(wheel)
    return str(beside) if beside.exists() else wheel


def _wheel(name: str) -> str:
    """Return the name of a distribution's wheel; all have one version."""
    return f"{name.replace('-', '_')}-{version(PACKAGE)}-py3-none-any.whl"
