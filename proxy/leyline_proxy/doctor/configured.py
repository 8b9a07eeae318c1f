"""Checks of everything that the settings name: keys, policies, secrets and their files."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from leyline_policies import PolicyError
from leyline_policies.config import load_policies

from ..edits.sensitive import sensitive_content
from ..model.fields import OptionError
from ..settings import DEFAULT_TENANT, Settings
from ..settings.api_keys import HASHED, ApiKey
from ..settings.authorities import ANYWHERE, Authority
from ..settings.faults import Fault, ignored_variables
from ..settings.sessions import MEMORY
from ..tenants.directory import build_directory, configured_keys
from ..tenants.key_file import read_keys
from ..tenants.tenant import build_tenant
from ..wiring.tracing import OTEL_INSTALL
from .findings import Finding, fail, ok, skip, warn

_SOON_S = 7 * 86_400.0
_READ_BY_ALL = stat.S_IROTH
_WRITTEN_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def config_findings(faults: Sequence[Fault]) -> list[Finding]:
    """Return errors in the settings, each with its place."""
    return [
        fail(
            "config", f"{fault.place}: {fault.problem}" if fault.place else fault.problem, fault.fix
        )
        for fault in faults
    ]


def examine_config(environ: Mapping[str, str], config: Path | None) -> list[Finding]:
    """Check that the settings can be read, and find variables that aren't settings."""
    strangers = [
        warn("config", f"{fault.place}: {fault.problem}", fault.fix)
        for fault in ignored_variables(environ)
    ]
    where = f"{config}, environment and flags" if config is not None else "environment and flags"
    return strangers or [ok("config", f"{where} can be read")]


def examine_keys(settings: Settings, now: float) -> list[Finding]:
    """Check API keys: the file, expiries, and access without keys."""
    name, file = "api-keys", settings.api_keys_file
    try:
        keys = configured_keys(settings)
        filed = read_keys(file) if file is not None else ()
    except ValueError as error:
        return [
            fail(
                name,
                str(error),
                "Write each line as TENANT:KEY or TENANT:sha256:HEX; leyline keys new makes one.",
            )
        ]
    keys = (*keys, *filed)
    others = _other_ways(settings)
    if not keys and others:
        found = [ok(name, f"none: callers need {others}")]
    else:
        found = [keys_verdict(keys, settings.host, now)]
    if file is not None:
        text = file.read_text(encoding="utf-8", errors="replace")
        found += file_verdicts(f"{name}.file", file, file.stat().st_mode, plain=_has_plain(text))
    return found


def _other_ways(settings: Settings) -> str:
    """Return the ways to be recognised without a key; empty if there are none."""
    ways = {
        "a token of the identity provider": settings.oidc_issuer is not None,
        "a certificate (tls_tenants)": bool(settings.tls_tenants),
    }
    return " or ".join(way for way, given in ways.items() if given)


def keys_verdict(keys: Sequence[ApiKey], host: str, now: float) -> Finding:
    """Judge whether exactly the right callers can get in."""
    name = "api-keys"
    if not keys:
        if _is_loopback(host):
            return ok(name, "none: every caller on this machine is the tenant default")
        return warn(
            name,
            f"none, and the proxy listens on {host}: it serves anyone who can reach it",
            "Make keys (leyline keys new) and name their file with --api-keys-file.",
        )
    valid = [key for key in keys if key.valid(now)]
    tenants = len({key.tenant for key in keys})
    detail = f"{len(keys)} keys of {tenants} tenants"
    if not valid:
        return fail(name, f"{detail}, all expired", "Make new ones: leyline keys new.")
    if len(valid) < len(keys):
        gone = sorted({key.id for key in keys if not key.valid(now)})
        return warn(
            name,
            f"{detail}; expired: {', '.join(gone[:4])}",
            "Remove them from the file (leyline keys shows their tenants).",
        )
    soon = sorted({key.tenant for key in keys if not key.valid(now + _SOON_S)})
    if soon:
        return warn(
            name,
            f"{detail}; keys expire within a week for: {', '.join(soon[:4])}",
            "Hand out new ones: leyline keys new.",
        )
    return ok(name, detail)


def examine_hosts(settings: Settings) -> list[Finding]:
    """Check the names by which clients may call a proxy without keys."""
    name, listed = "allowed-hosts", settings.allowed_hosts
    if configured_keys(settings) or settings.api_keys_file is not None:
        return [skip(name, "API keys are configured: requests may name any host")]
    if others := _other_ways(settings):
        return [skip(name, f"callers need {others}: requests may name any host")]
    everywhere = settings.host in ANYWHERE
    if everywhere and not listed:
        return [
            warn(
                name,
                f"none, and the proxy listens on {settings.host or 'all addresses'} without API "
                "keys: clients that call it by a name, not by its address, get 403",
                "Name the hosts that clients use for it (--allowed-host), or configure API keys.",
            )
        ]
    own = "any address" if everywhere else f"loopback, {settings.host}"
    return [ok(name, ", ".join((own, *listed[:8])))]


def file_verdicts(name: str, path: Path, mode: int, *, plain: bool) -> list[Finding]:
    """Judge whether others can read or change a file of keys.

    Args:
        plain: True if it holds keys themselves, not only their digests.
    """
    if mode & _WRITTEN_BY_OTHERS:
        return [warn(name, f"other users can change {path}", f"chmod go-w {path}")]
    if plain and mode & _READ_BY_ALL:
        return [
            warn(
                name,
                f"{path} holds plain keys, and every user can read it",
                f"chmod o-r {path}, or keep only digests (TENANT:sha256:HEX).",
            )
        ]
    return []


def _has_plain(text: str) -> bool:
    lines = (line.strip() for line in text.splitlines())
    return any(
        not line.partition(":")[2].startswith(HASHED)
        for line in lines
        if line and not line.startswith("#")
    )


def _is_loopback(host: str) -> bool:
    return Authority(host.lower()).is_loopback


def examine_policies(settings: Settings) -> list[Finding]:
    """Check that every named policy exists and takes its parameters."""
    name, file = "policies", settings.policies_file
    try:
        sensitive_content(settings.sensitive)
        tenants = {*settings.tenants, DEFAULT_TENANT}
        built = [build_tenant(tenant, settings) for tenant in sorted(tenants)]
        policies = load_policies(file) if file is not None else None
    except (PolicyError, OptionError, ValueError) as error:
        return [
            fail(
                name,
                str(error),
                f"Fix {file or 'the setting'}: leyline policies list shows all policies and their "
                "parameters.",
            )
        ]
    if policies is not None:
        strangers = policies.unknown_tenants(_tenants(settings))
        if strangers:
            return [
                warn(
                    name,
                    f"{file} has policies for tenants that there aren't: {', '.join(strangers)}",
                    "Correct the names in the file, or give these tenants keys or settings.",
                )
            ]
        return [ok(name, f"{file}: {len(policies.describe())} pipelines")]
    steps = {len(tenant.policies) for tenant in built}
    return [ok(name, f"up to {max(steps)} per turn" if max(steps) else "none: nothing is edited")]


def _tenants(settings: Settings) -> frozenset[str]:
    """Return the names of all tenants, as far as their keys can be read."""
    try:
        return build_directory(settings).names
    except ValueError:  # the check of the keys reports it
        return frozenset(settings.tenants)


def examine_secrets(settings: Settings) -> list[Finding]:
    """Check that sessions outside the process are encrypted, and that files of secrets exist."""
    found = _missing_files(settings)
    if settings.session_store.get_secret_value() == MEMORY:
        return [*found, skip("session-secret", "sessions are only in this process's memory")]
    if not settings.session_secret:
        return [
            *found,
            warn(
                "session-secret",
                "none: no prompt text is stored in Redis, and no other proxy can continue to "
                "splice a session",
                "Give all proxies the same LEYLINE_SESSION_SECRET (openssl rand -hex 32).",
            ),
        ]
    return [*found, ok("session-secret", "sessions in Redis are encrypted")]


def examine_trace(settings: Settings) -> list[Finding]:
    """Check that spans can be exported with the settings and OpenTelemetry's variables."""
    if settings.trace == "off":
        return [skip("trace", "tracing is off (trace)")]
    try:
        # Needs OpenTelemetry, an extra.
        from ..telemetry.tracing.exporting import collector_place, otlp_exporter

        if settings.trace == "console":
            return [ok("trace", "spans go to stdout")]
        otlp_exporter().shutdown()
        return [ok("trace", f"spans go to {collector_place()}, which isn't checked")]
    except ModuleNotFoundError as error:
        fix = f"{OTEL_INSTALL}, or set trace: off."
        return [fail("trace", f"the package {error.name!r} is missing", fix)]
    except ValueError as error:
        return [
            fail(
                "trace",
                str(error),
                "Correct the variable that the message names, or set trace: off.",
            )
        ]


def _missing_files(settings: Settings) -> list[Finding]:
    named = {"redis_ca_file": settings.redis_ca_file, "audit_key_file": settings.audit_key_file}
    return [
        fail("config", f"{name}: {path} can't be read", f"Put the file there, or correct {name}.")
        for name, path in named.items()
        if path is not None and not (path.is_file() and os.access(path, os.R_OK))
    ]


def known_tenants(settings: Settings) -> set[str]:
    """Return the tenants of the settings, without those of a file of keys."""
    return {*settings.tenants, *(key.tenant for key in configured_keys(settings))}


def strangers(check: str, setting: str, settings: Settings) -> Finding | None:
    """Return a warning about tenants that a mapping names and the settings don't know; None for
    none, and with a file of keys, which may name any.

    Args:
        check: name of the finding.
        setting: the mapping.
    """
    known, mapped = known_tenants(settings), getattr(settings, setting)
    unknown = sorted({*mapped.values()} - known)
    if not unknown or not known or settings.api_keys_file is not None:
        return None
    return warn(
        check,
        f"{setting} names tenants without settings of their own: {', '.join(unknown)[:200]}",
        "correct the names, or add them to tenants: they have the proxy's limits and policies",
    )
