"""The fidelity profile: the settings at which a model's answers over a splice were measured. Pure.

``leyline eval`` recommends one for each model. Proxy and engines load the file (the setting
``fidelity_profile``); a report of ``leyline eval`` is such a file, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from .recompute import Recompute

MAX_FILE_BYTES = 64 << 20
"""Maximum size of a file of profiles; reports are far smaller."""
MAX_BOUNDARY = 4096
"""Maximum number of tokens after an edit that are computed again."""
MAX_QUOTE = 64
"""Upper bound of the length from which on a repetition counts as a quote, in tokens."""
MAX_ERRATUM = 400
"""Maximum length of an erratum in characters."""


class ProfileError(ValueError):
    """Bytes that hold no profiles; the message names the member."""


class FidelityProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The recommended settings of one model."""

    model: str
    """Name under which it was measured."""
    model_fingerprint: str = ""
    """Fingerprint of what was measured; empty fits every model of that name."""
    boundary: Annotated[int, msgspec.Meta(ge=0, le=MAX_BOUNDARY)] = 0
    """Number of tokens after each edit to compute again."""
    quotes: Annotated[int, msgspec.Meta(ge=0, le=MAX_QUOTE)] = 0
    """Length of the shortest quote of cut text, in tokens, that is computed again; 0 for none."""
    erratum: Annotated[str, msgspec.Meta(max_length=MAX_ERRATUM)] = ""
    """Note that a shortened message ends with; empty for none. ``{name}`` is replaced with the
    tool's name, or else with the message's role."""
    reasoning_edits: Literal["", "amortize", "exact"] = ""
    """The mode of thinking that the template strips, if it was measured."""
    reached: bool = True
    """True if the settings reached the goal where they were measured."""

    @property
    def recompute(self) -> Recompute:
        """The tokens after an edit to compute again."""
        return Recompute(self.boundary, self.quotes)


class _Profiles(msgspec.Struct, frozen=True, kw_only=True):
    profiles: tuple[FidelityProfile, ...]


def parse_profiles(content: bytes) -> tuple[FidelityProfile, ...]:
    """Return the profiles of a file: the member ``profiles`` of a JSON object.

    Raises:
        ProfileError: there is no such member, or it has a wrong value.
    """
    try:
        found = msgspec.json.decode(content, type=_Profiles).profiles
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProfileError(str(error)) from error
    if not found:
        raise ProfileError("it recommends nothing: $.profiles is empty")
    return found


def read_profiles(path: Path) -> tuple[FidelityProfile, ...]:
    """Return the profiles of a file.

    Raises:
        ProfileError: it can't be read, or holds none; the message names the file.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ProfileError(f"it has more than {MAX_FILE_BYTES} bytes")
        return parse_profiles(path.read_bytes())
    except OSError as error:
        raise ProfileError(f"fidelity_profile: {path} can't be read: {error.strerror}") from error
    except ProfileError as error:
        raise ProfileError(f"fidelity_profile: {path} holds no profiles: {error}") from error


def own_profile(path: Path, model: str, fingerprint: str) -> FidelityProfile:
    """Return the profile of a file for one model.

    Raises:
        ProfileError: it can't be read, or has none for the model.
    """
    profiles = read_profiles(path)
    found = profile_of(profiles, model, fingerprint)
    if found is None:
        known = ", ".join(each.model for each in profiles)
        raise ProfileError(
            f"fidelity_profile: {path} has no profile for {model}, only for {known}; measure "
            "the model with `leyline eval`"
        )
    return found


def profile_of(
    profiles: Iterable[FidelityProfile], model: str, fingerprint: str
) -> FidelityProfile | None:
    """Return the profile of a model; None if there is none.

    That of its fingerprint comes first, then that of its name: engines of different kinds
    fingerprint the same weights differently.
    """
    known = tuple(profiles)
    exact = (each for each in known if fingerprint and each.model_fingerprint == fingerprint)
    named = (each for each in known if each.model == model)
    return next(exact, None) or next(named, None)
