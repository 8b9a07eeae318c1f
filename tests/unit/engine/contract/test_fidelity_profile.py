"""Files of fidelity profiles: which model a profile is for, and what is wrong with a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leyline_engine.contract import (
    FidelityProfile,
    ProfileError,
    own_profile,
    profile_of,
    read_profiles,
)

MINE = FidelityProfile(model="m", model_fingerprint="f1", boundary=2)
OTHER = FidelityProfile(model="n", model_fingerprint="f2", boundary=8)


def written(folder: Path, document: Any) -> Path:
    """Return a file with the document."""
    path = folder / "profiles.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_a_fingerprint_comes_before_a_name() -> None:
    """Weights that were measured under another name have their own profile."""
    assert profile_of([MINE, OTHER], "m", "f2") == OTHER
    assert profile_of([MINE, OTHER], "m", "unknown") == MINE
    assert profile_of([MINE, OTHER], "o", "unknown") is None


def test_a_report_is_a_file_of_profiles(tmp_path: Path) -> None:
    """Other members of the document are left alone."""
    document = {
        "tables": {},
        "profiles": [{"model": "m", "model_fingerprint": "f1", "boundary": 2}],
    }
    assert read_profiles(written(tmp_path, document)) == (MINE,)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("{", "truncated"),
        ({"tables": {}}, "profiles"),
        ({"profiles": []}, "empty"),
        ({"profiles": [{"boundary": 2}]}, "model"),
        ({"profiles": [{"model": "m", "boundary": -1}]}, "boundary"),
        ({"profiles": [{"model": "m", "quotes": 65}]}, "quotes"),
        ({"profiles": [{"model": "m", "erratum": "x" * 401}]}, "erratum"),
    ],
)
def test_a_bad_file_is_named_with_the_member(tmp_path: Path, document: Any, said: str) -> None:
    """The message has the setting, the path and what is wrong."""
    path = written(tmp_path, document)
    with pytest.raises(ProfileError, match=said) as caught:
        read_profiles(path)
    assert str(caught.value).startswith(f"fidelity_profile: {path}")


def test_a_model_without_a_profile_is_named(tmp_path: Path) -> None:
    """An engine doesn't start with another model's settings."""
    path = written(tmp_path, {"profiles": [{"model": "m"}]})
    with pytest.raises(ProfileError, match="has no profile for n, only for m"):
        own_profile(path, "n", "")
    with pytest.raises(ProfileError, match="can't be read"):
        own_profile(tmp_path / "none.json", "n", "")
