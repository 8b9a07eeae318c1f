"""Runs the commands of a Dockerfile in a folder instead of a container.

What a container engine would do with paths, the folder's name before them does here: `/opt/leyline`
is `ROOT/opt/leyline`. All stages share the folder. Not run: what makes users and owners.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

from dockerfile_parse import DockerfileParser

_PATHS = re.compile(r"(?<![\w/.:-])/(?=(?:opt|src|wheels|var/cache/leyline)\b)")
_FLAG = re.compile(r"--(?:mount|from|interval|timeout|retries|start-period)=\S+\s+")
_OWNERS = ("useradd ", "install --directory --owner")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its name in capitals, and what follows on one line."""

    name: str
    value: str

    def words(self) -> list[str]:
        """The value's words without flags; of an instruction in exec form, the list."""
        bare = _FLAG.sub("", self.value)
        if bare.lstrip().startswith("["):
            words: list[str] = json.loads(bare)
            return words
        return shlex.split(bare)


@dataclass(frozen=True, slots=True)
class Stage:
    """From one FROM to the next."""

    base: str
    instructions: tuple[Instruction, ...]

    def of(self, name: str) -> list[Instruction]:
        """Its instructions of that name."""
        return [item for item in self.instructions if item.name == name]

    def last(self, name: str) -> list[str]:
        """The words of the last instruction of that name, the one that counts."""
        return self.of(name)[-1].words()

    def environment(self) -> dict[str, str]:
        """The variables that ENV sets, as written."""
        pairs = (word.partition("=") for item in self.of("ENV") for word in item.words())
        return {name: value for name, _, value in pairs}


def stages_of(dockerfile: Path) -> list[Stage]:
    """The stages of a Dockerfile, in order."""
    parser = DockerfileParser(fileobj=BytesIO(dockerfile.read_bytes()))
    stages: list[list[Instruction]] = []
    for item in parser.structure:
        if item["instruction"] == "COMMENT":
            continue
        if item["instruction"] == "FROM":
            stages.append([])
        stages[-1].append(Instruction(item["instruction"], item["value"]))
    return [Stage(found[0].words()[0], tuple(found[1:])) for found in stages]


@dataclass(slots=True)
class ImageFolder:
    """An image's content, below ``root``.

    Args:
        root: a folder that isn't there yet.
        context: the repository.
        python: the interpreter that the base images' ``python`` means; ``root/usr/local`` is
            made a virtual environment of it.
        build_args: values for ARG.
    """

    root: Path
    context: Path
    python: Path
    build_args: Mapping[str, str] = field(default_factory=dict)
    not_run: list[str] = field(default_factory=list)

    def build(self, stages: Sequence[Stage]) -> Stage:
        """Run the stages; returns the last one.

        Raises:
            subprocess.CalledProcessError: a command fails; its output is with it.
        """
        if not self.root.exists():
            self.root.mkdir(parents=True)
            _run([str(self.python), "-m", "venv", str(self.root / "usr/local")], self.root, {})
        for stage in stages:
            self._stage(stage)
        return stages[-1]

    def inside(self, text: str) -> str:
        """``text`` with the container's paths turned into those below the folder."""
        return _PATHS.sub(f"{self.root}/", text)

    def environment(self, stage: Stage) -> dict[str, str]:
        """The environment of a process in ``stage``; of this process's only what pip needs."""
        kept = {name: value for name, value in os.environ.items() if _is_kept(name)}
        path = f"{self.root}/usr/local/bin:/usr/bin:/bin"
        found = {"PATH": path, "HOME": str(self.root), "LANG": "C.UTF-8", **kept}
        for name, value in stage.environment().items():
            found[name] = self.inside(value).replace("$PATH", found["PATH"])
        return found

    def command(self, words: Sequence[str]) -> list[str]:
        """A command of the image; its program is looked up in the image's PATH by who runs it."""
        return [self.inside(word) for word in words]

    def _stage(self, stage: Stage) -> None:
        variables = self.environment(stage)
        folder = self.root
        for item in stage.instructions:
            if item.name == "ARG":
                name, _, value = item.value.partition("=")
                variables[name] = self.build_args.get(name, value)
            elif item.name == "WORKDIR":
                folder = Path(self.inside(item.value))
                folder.mkdir(parents=True, exist_ok=True)
            elif item.name == "COPY" and "--from=" not in item.value:
                *sources, target = item.words()
                self._copy(sources, folder / self.inside(target))
            elif item.name == "RUN" and item.value.lstrip().startswith(_OWNERS):
                self.not_run.append(item.value)
            elif item.name == "RUN":
                _run(["sh", "-c", self.inside(_FLAG.sub("", item.value))], folder, variables)
        for volume in stage.of("VOLUME"):
            Path(self.inside(volume.value)).mkdir(parents=True, exist_ok=True)

    def _copy(self, sources: Sequence[str], target: Path) -> None:
        for name in sources:
            source = self.context / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                place = target / source.name if len(sources) > 1 else target
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, place)


def ignored_by(ignore_file: Path) -> tuple[list[str], list[str]]:
    """Return the paths that an ignore file excludes, and those it includes again."""
    lines = [line for line in ignore_file.read_text().splitlines() if line and line[0] != "#"]
    allowed = [line[1:] for line in lines if line.startswith("!")]
    return [line for line in lines if not line.startswith("!")], allowed


def copied_from_context(stages: Sequence[Stage]) -> Iterator[str]:
    """Each path that the stages copy from the repository."""
    for stage in stages:
        for item in stage.of("COPY"):
            if "--from=" not in item.value:
                yield from item.words()[:-1]


def _is_kept(name: str) -> bool:
    # How this machine reaches a package index, and its certificates.
    return name.startswith(("PIP_", "SSL_")) or name.lower().endswith("_proxy")


def _run(command: Sequence[str], folder: Path, variables: Mapping[str, str]) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        env=dict(variables) or None,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout[-4000:])
