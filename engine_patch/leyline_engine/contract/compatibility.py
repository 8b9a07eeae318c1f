"""The versions of proxy, plugin and engine that work together, and the judgement of a pair.

Proxy and plugin come in one wheel, so they share version numbers. ``RELEASES`` is the only place of
these facts: the plugins, the handshake, ``leyline doctor`` and docs/compatibility.md read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from .capability import Capability, Plugin
from .vocabulary import ACTION_VERSION, EDIT_ACTION, PROTOCOL_VERSION

SGLANG = "sglang"
VLLM = "vllm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One release of Leyline, and what it works with.

    A release states only what was there before it. What came later states itself.
    """

    version: str
    plugins: str
    """Versions of plugins, up to its own, that its proxy sends edits to (PEP 440)."""
    proxies: str
    """Versions of proxies, up to its own, whose edits its plugin takes (PEP 440)."""
    contract: str = PROTOCOL_VERSION
    """Version of the envelope."""
    engines: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Tested versions by engine, latest first. An engine that isn't here has none, as the embedded
    one: it is a part of the wheel."""


RELEASES: tuple[Release, ...] = (
    Release(
        version="0.1.0",
        plugins=">=0.1.0",
        proxies=">=0.1.0",
        contract="0.1",
        engines={SGLANG: ("0.5.23",), VLLM: ("0.32.0",)},
    ),
)
"""All releases, latest first."""
THIS_RELEASE = RELEASES[0]
"""The release of this code."""


class MismatchReason(StrEnum):
    """The reason that a proxy sends an engine no edits because of versions."""

    CONTRACT = "contract_version"
    PLUGIN_TOO_OLD = "plugin_too_old"
    PROXY_TOO_OLD = "proxy_too_old"
    UNREADABLE = "version_unreadable"
    EDIT_ACTION = "edit_action_version"
    ENGINE_UNTESTED = "engine_untested"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Versions that don't fit."""

    reason: MismatchReason
    detail: str
    """Both versions by name."""
    fix: str
    """The remedy."""

    def __str__(self) -> str:
        return f"{self.detail} ({self.reason})"


def this_plugin() -> Plugin:
    """Return what a capability document states about the plugin of this release."""
    return Plugin(version=THIS_RELEASE.version, proxies=THIS_RELEASE.proxies)


def engine_versions(engine: str, release: Release = THIS_RELEASE) -> tuple[str, ...]:
    """Return the versions of ``engine`` that a release is tested with, latest first."""
    return release.engines.get(engine, ())


def is_tested(engine: str, version: str, release: Release = THIS_RELEASE) -> bool:
    """Return True if a release is tested with a version of ``engine``.

    Builds of one version, such as ``0.5.23+cpu``, are alike.
    """
    return version.partition("+")[0] in engine_versions(engine, release)


def judge(
    capability: Capability,
    proxy: Release = THIS_RELEASE,
    releases: Sequence[Release] = RELEASES,
) -> Mismatch | None:
    """Return what keeps a proxy from sending edits to an engine; None if their versions fit.

    The newer side decides on a pair of proxy and plugin, as only it knows the other.

    Args:
        capability: the engine's document.
        proxy: the proxy's own release.
        releases: the proxy's own and earlier releases, latest first.
    """
    if capability.protocol_version != proxy.contract:
        return Mismatch(
            MismatchReason.CONTRACT,
            f"the plugin speaks version {_told(capability.protocol_version)} of the contract, and "
            f"this proxy version {proxy.contract}",
            "install one release of Leyline on both sides",
        )
    return (
        _judge_pair(capability.plugin, proxy)
        or _judge_action(capability)
        or _judge_engine(capability, releases)
    )


def _judge_pair(plugin: Plugin, proxy: Release) -> Mismatch | None:
    """Judge the versions of plugin and proxy. One that doesn't state its own is judged by the
    rest of its document: it came before these fields."""
    if not plugin.version:
        return None
    try:
        theirs, ours = Version(plugin.version), Version(proxy.version)
        newer = theirs > ours
        # A newer plugin that states nothing leaves the judgement to the contract.
        allowed = SpecifierSet(plugin.proxies if newer else proxy.plugins)
    except (InvalidVersion, InvalidSpecifier):
        return Mismatch(
            MismatchReason.UNREADABLE,
            f"the plugin's version {_told(plugin.version)}, or its proxies "
            f"{_told(plugin.proxies)}, can't be read",
            f"install Leyline {proxy.version} beside the engine",
        )
    older = ours if newer else theirs
    if theirs == ours or allowed.contains(older, prereleases=True):
        return None
    if newer:
        return Mismatch(
            MismatchReason.PROXY_TOO_OLD,
            f"the plugin {theirs} works with proxies {allowed}, and this proxy is {ours}",
            f"upgrade this proxy to Leyline {theirs}",
        )
    return Mismatch(
        MismatchReason.PLUGIN_TOO_OLD,
        f"this proxy {ours} works with plugins {allowed}, and the plugin is {theirs}",
        f"upgrade the plugin beside the engine to Leyline {ours}",
    )


def _judge_action(capability: Capability) -> Mismatch | None:
    """Judge whether an engine that splices takes edits as this contract writes them."""
    action = f"{EDIT_ACTION}@{ACTION_VERSION}"
    if not capability.splices or action in capability.actions:
        return None
    return Mismatch(
        MismatchReason.EDIT_ACTION,
        f"the engine doesn't take {action}",
        "install one release of Leyline on both sides",
    )


def _judge_engine(capability: Capability, releases: Sequence[Release]) -> Mismatch | None:
    """Judge whether the plugin's release was tested with its engine's version.

    A plugin that doesn't state its version is taken for the earliest release. A plugin of another
    release than the table's judges its engine itself.
    """
    stated = capability.plugin.version or releases[-1].version
    release = next((each for each in releases if each.version == stated), None)
    if release is None or capability.engine not in release.engines:
        return None
    version = capability.engine_version.removeprefix(f"{capability.engine} ")
    if is_tested(capability.engine, version, release):
        return None
    tested = " or ".join(engine_versions(capability.engine, release))
    return Mismatch(
        MismatchReason.ENGINE_UNTESTED,
        f"the plugin {release.version} is tested with {capability.engine} {tested}, and the "
        f"engine is {capability.engine} {_told(version)}",
        f"install {capability.engine} {tested}, or a release of Leyline that is tested with it",
    )


def _told(text: str) -> str:
    """Return a version as a plugin wrote it, in bounds for a message."""
    return repr(text if len(text) <= 40 else f"{text[:40]}…")
