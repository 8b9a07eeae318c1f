"""A package with a policy, as a start for new ones."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from pathlib import Path

from leyline_policies import Registry

from ..model.name_rule import NameRule

_NAME = NameRule("[a-z0-9_]", "small letters, digits and _, such as short_pastes", 48)


class ScaffoldError(ValueError):
    """The package can't be written; the message gives the reason."""


def _broken(name: str) -> str | None:
    """Return what keeps a name from being a policy's; None if nothing does."""
    if keyword.iskeyword(name):
        return "is a word of Python's own"
    broken = _NAME.broken(name)
    if broken is None and not name[0].isalpha():
        return f"begins with {name[0]!r}; it needs a letter there"
    return broken


def write_package(name: str, parent: Path, registry: Registry) -> Path:
    """Write the package ``NAME`` below ``parent``, and return its folder.

    Raises:
        ScaffoldError: an unfit or existing name, or a folder that exists or can't be written.
    """
    if (broken := _broken(name)) is not None:
        raise ScaffoldError(f"{name[:60]!r} can't be a policy's name: it {broken}")
    if name in registry.names():
        raise ScaffoldError(f"a policy is called {name!r} already; choose another name")
    folder = parent / name
    try:
        folder.mkdir(parents=True)
        for path, text in package_files(name).items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except FileExistsError as error:
        raise ScaffoldError(f"{folder} exists already; choose another --dir") from error
    except OSError as error:
        raise ScaffoldError(f"{folder} can't be written: {error.strerror}") from error
    return folder


def package_files(name: str) -> Mapping[str, str]:
    """Return the package's files by their path in it."""
    words = {
        "NAME": name,
        "DISTRIBUTION": "leyline-" + name.replace("_", "-"),
        "CLASS": "".join(part.capitalize() for part in name.split("_")),
    }

    def filled(text: str) -> str:
        for word, value in words.items():
            text = text.replace(f"@{word}@", value)
        return text

    return {filled(path): filled(text) for path, text in _FILES.items()}


_FILES = {
    "pyproject.toml": """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "@DISTRIBUTION@"
version = "0.1.0"
description = "The Leyline policy @NAME@."
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["leyline-kv"]

[project.optional-dependencies]
test = ["pytest>=8"]

[project.entry-points."leyline.policies"]
@NAME@ = "@NAME@:@CLASS@"

[tool.setuptools.packages.find]
where = ["src"]

[tool.pytest.ini_options]
pythonpath = ["src"]
testpaths = ["tests"]
""",
    "src/@NAME@/__init__.py": '''\
"""The Leyline policy @NAME@."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from leyline_policies import Message, Mode, map_text


@dataclass(frozen=True)
class @CLASS@:
    """Shorten what the user pasted long ago."""

    name: ClassVar[str] = "@NAME@"
    mode: ClassVar[Mode] = "amortize"  # "forget" for what must not influence the model any more

    limit: Annotated[int, "characters that stay of each message"] = 2000
    keep_last: Annotated[int, "newest messages of the user that stay whole"] = 1

    def __post_init__(self) -> None:
        for key, value in (("limit", self.limit), ("keep_last", self.keep_last)):
            if value < 1:
                raise ValueError(f"{key}={value} is too small; it must be 1 or more")

    def transform(self, messages: list[Message], turn_idx: int) -> list[Message]:
        pasted = [index for index, m in enumerate(messages) if m["role"] == "user"]
        edited = list(messages)
        for index in pasted[: -self.keep_last]:
            edited[index] = map_text(messages[index], lambda text: text[: self.limit])
        return edited
''',
    "src/@NAME@/py.typed": "",
    "tests/test_@NAME@.py": '''\
"""The policy @NAME@: what it edits, what it leaves, and the rules that all policies keep."""

from __future__ import annotations

import pytest
from leyline_policies import SpecError, load_pipeline
from leyline_policies.testing import check_policy, requests_of

from @NAME@ import @CLASS@

PASTED = {"role": "user", "content": "x" * 100}
ANSWER = {"role": "assistant", "content": "y" * 100}


def test_old_pastes_are_shortened() -> None:
    """Messages of the user lose what is beyond the limit, but for the newest ones."""
    old, answer, newest = @CLASS@(limit=10).transform([PASTED, ANSWER, PASTED], 1)
    assert old["content"] == "x" * 10
    assert answer is ANSWER
    assert newest is PASTED


def test_the_rules_are_kept() -> None:
    """Made-up sessions show no broken rule, and the policy saves tokens on a session of its own."""
    check_policy(@CLASS@(limit=20))
    report = check_policy(@CLASS@(limit=20), [requests_of([PASTED, ANSWER] * 5)])
    assert report.reclaimed_tokens > 0


def test_it_is_chosen_by_name() -> None:
    """The installed package offers the policy to every Leyline beside it."""
    (policy,) = load_pipeline("@NAME@:limit=5")
    assert policy == @CLASS@(limit=5)
    with pytest.raises(SpecError, match="limit=0 is too small"):
        load_pipeline("@NAME@:limit=0")
''',
    "README.md": """\
# @DISTRIBUTION@

The Leyline policy `@NAME@`. In the environment that has Leyline:

    pip install -e '.[test]'
    pytest
    leyline policies show @NAME@
    leyline policies try @NAME@:limit=500 session.jsonl
    leyline serve --policy @NAME@:limit=500

`src/@NAME@/__init__.py` is the policy: its fields are the settings, `transform` gets the whole
conversation on every turn and returns the messages to send. It must give the same output for the
same input, must not change what it is given, and keeps tool calls together with their results.
`tests/` checks these rules with `leyline_policies.testing`.
""",
}
