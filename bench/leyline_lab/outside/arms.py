"""The arms of a comparison and their settings of the proxy. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from pathlib import Path

from ..errors import MissingError, PlanError

PROFILE_SETTING = "fidelity_profile"
"""The proxy's setting with the measured profile of a model: boundary recompute and erratum."""
PREFIX = "LEYLINE_"
PASSED_ON = frozenset({"LEYLINE_UPSTREAM_API_KEY", "LEYLINE_HINTS_SECRET"})
"""The user's settings that reach the proxy. All others would make two arms of a name differ."""


class OutsideArm(StrEnum):
    """Ways to serve the same edited prompts."""

    RE_PREFILL = "re-prefill"
    """The policy edits, and the engine prefills what follows the edit again."""
    SPLICE = "splice"
    """The policy edits, and the engine splices."""
    SPLICE_PROFILE = "splice+profile"
    """The same, corrected as the model's profile says."""

    @property
    def splices(self) -> bool:
        """True if the engine must splice in this arm."""
        return self is not OutsideArm.RE_PREFILL


BASELINE = OutsideArm.RE_PREFILL
"""The arm that the others are compared with."""


def parse_arms(text: str) -> tuple[OutsideArm, ...]:
    """Return the arms of a comma-separated list, each once, in the given order.

    Raises:
        PlanError: an unknown arm, one that is named twice, or none.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [arm.value for arm in OutsideArm]
    for name in names:
        if name not in known:
            raise PlanError(f"there is no arm {name!r}; there are {', '.join(known)}")
    if not names or len(set(names)) != len(names):
        raise PlanError(f"name each arm once, for example: --arms {known[0]},{known[1]}")
    return tuple(OutsideArm(name) for name in names)


def check_profile(
    arms: Sequence[OutsideArm], profile: Path | None, settings: Collection[str]
) -> None:
    """Check that the arm with a profile can be run.

    Args:
        settings: names of the settings that this version's proxy knows.

    Raises:
        MissingError: there is no profile, or no setting that takes one.
    """
    if OutsideArm.SPLICE_PROFILE not in arms:
        return
    if profile is None:
        raise MissingError(
            f"the arm {OutsideArm.SPLICE_PROFILE} needs the model's profile: --profile FILE, "
            f"or leave the arm out: --arms {OutsideArm.RE_PREFILL},{OutsideArm.SPLICE}"
        )
    if PROFILE_SETTING not in settings:
        raise MissingError(
            f"this version of the proxy has no setting {PROFILE_SETTING}: leave the arm "
            f"{OutsideArm.SPLICE_PROFILE} out"
        )
    if not profile.is_file():
        raise MissingError(f"there is no profile {profile}")


def arm_settings(arm: OutsideArm, policy: str, profile: Path | None) -> dict[str, str]:
    """Return the settings in which the arms differ, and the policy, as variables of the proxy.

    Edits are sent at once in every arm, so that the arms send the same prompts.
    """
    settings = {
        "LEYLINE_POLICY": policy,
        "LEYLINE_EDIT_TIMING": "now",
        "LEYLINE_SPLICE": "true" if arm.splices else "false",
    }
    if arm is OutsideArm.SPLICE_PROFILE and profile is not None:
        settings[PREFIX + PROFILE_SETTING.upper()] = str(profile.resolve())
    return settings


def isolation_settings(tenant: str, key: str, *, isolates: bool) -> dict[str, str]:
    """Return the settings by which no run finds the KV of another.

    Args:
        tenant: a name that no other run has.
        isolates: True if the engine keeps KV of tenants apart. Without it the runs share prefixes.
    """
    return {
        "LEYLINE_API_KEYS": f"{tenant}:{key}",
        "LEYLINE_CACHE_SCOPE": "tenant" if isolates else "shared",
    }


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for the benchmark: it holds neither settings nor keys of the proxy."""
    return {name: value for name, value in environment.items() if not name.startswith(PREFIX)}


def benchmark_environment(
    environment: Mapping[str, str], variables: Mapping[str, str]
) -> dict[str, str]:
    """Return an environment with a step's variables; hosts without a web proxy are added to."""
    own = without_settings(environment)
    joined = {
        name: f"{own[name]},{variables[name]}"
        for name in ("NO_PROXY", "no_proxy")
        if own.get(name) and name in variables
    }
    return {**own, **variables, **joined}


def proxy_environment(
    environment: Mapping[str, str], settings: Mapping[str, str]
) -> dict[str, str]:
    """Return an environment in which a proxy has these settings and no others."""
    kept = {name: environment[name] for name in PASSED_ON if name in environment}
    # Shared metrics would count the turns of other proxies.
    own = {
        name: value
        for name, value in without_settings(environment).items()
        if name != "PROMETHEUS_MULTIPROC_DIR"
    }
    return {**own, **kept, **settings}
