"""What the settings name: keys, policies, secrets and the files they are in."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from leyline_policies import PolicyError
from leyline_policies.config import load_policies

from ..core.api_keys import HASHED, ApiKey
from ..core.authorities import ANYWHERE, Authority
from ..core.options import OptionError
from ..pipeline.sensitive import sensitive_content
from ..settings import DEFAULT_TENANT, Settings
from ..settings.faults import Fault, unknown_variables
from ..settings.sessions import MEMORY
from ..telemetry.tracing.build import OTEL_INSTALL
from ..tenants.directory import configured_keys
from ..tenants.key_file import read_keys
from ..tenants.tenant import build_tenant
from .findings import Finding, fail, ok, skip, warn

_SOON_S = 7 * 86_400.0
_READ_BY_ALL = stat.S_IROTH
_WRITTEN_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def config_findings(faults: Sequence[Fault]) -> list[Finding]:
    """What is wrong with the settings, each with its place."""
    return [
        fail(
            "config", f"{fault.place}: {fault.problem}" if fault.place else fault.problem, fault.fix
        )
        for fault in faults
    ]


def examine_config(environ: Mapping[str, str], config: Path | None) -> list[Finding]:
    """Settings that can be read, and variables that are none."""
    strangers = [
        warn("config", f"{fault.place}: {fault.problem}", fault.fix)
        for fault in unknown_variables(environ)
    ]
    where = f"{config}, environment and flags" if config is not None else "environment and flags"
    return strangers or [ok("config", f"{where} can be read")]


def examine_keys(settings: Settings, now: float) -> list[Finding]:
    """API keys: the file, expiries, and who gets in without any."""
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
    found = [keys_verdict((*keys, *filed), settings.host, now)]
    if file is not None:
        text = file.read_text(encoding="utf-8", errors="replace")
        found += file_verdicts(f"{name}.file", file, file.stat().st_mode, plain=_has_plain(text))
    return found


def keys_verdict(keys: Sequence[ApiKey], host: str, now: float) -> Finding:
    """Whether callers can get in, and only those who should."""
    name = "api-keys"
    if not keys:
        if _is_loopback(host):
            return ok(name, "none: everybody on this machine is the tenant default")
        return warn(
            name,
            f"none, and the proxy listens on {host}: whoever reaches it is served",
            "Make keys (leyline keys new) and name their file with --api-keys-file.",
        )
    valid = [key for key in keys if key.valid(now)]
    tenants = len({key.tenant for key in keys})
    told = f"{len(keys)} keys of {tenants} tenants"
    if not valid:
        return fail(name, f"{told}, all of which have expired", "Make new ones: leyline keys new.")
    if len(valid) < len(keys):
        gone = sorted({key.id for key in keys if not key.valid(now)})
        return warn(
            name,
            f"{told}; expired: {', '.join(gone[:4])}",
            "Take them out of the file (leyline keys shows whose they are).",
        )
    soon = sorted({key.tenant for key in keys if not key.valid(now + _SOON_S)})
    if soon:
        return warn(
            name,
            f"{told}; within a week keys expire of: {', '.join(soon[:4])}",
            "Hand out new ones: leyline keys new.",
        )
    return ok(name, told)


def examine_hosts(settings: Settings) -> list[Finding]:
    """By which names clients may call a proxy without keys."""
    name, listed = "allowed-hosts", settings.allowed_hosts
    if configured_keys(settings) or settings.api_keys_file is not None:
        return [skip(name, "API keys are configured: requests may name any host")]
    everywhere = settings.host in ANYWHERE
    if everywhere and not listed:
        return [
            warn(
                name,
                f"none, and the proxy listens on {settings.host or 'all addresses'} without API "
                "keys: whoever calls it by a name, not by its address, gets 403",
                "Name the hosts by which clients call it (--allowed-host), or configure API keys.",
            )
        ]
    own = "any address" if everywhere else f"loopback, {settings.host}"
    return [ok(name, ", ".join((own, *listed[:8])))]


def file_verdicts(name: str, path: Path, mode: int, *, plain: bool) -> list[Finding]:
    """Whether a file of keys can be read or changed by others.

    Args:
        plain: it holds keys themselves, not only their digests.
    """
    if mode & _WRITTEN_BY_OTHERS:
        return [
            warn(name, f"{path} can be changed by other users", f"chmod go-w {path}"),
        ]
    if plain and mode & _READ_BY_ALL:
        return [
            warn(
                name,
                f"{path} holds plain keys and can be read by every user",
                f"chmod o-r {path}, or keep digests only (TENANT:sha256:HEX).",
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
    """Whether every policy that is named exists and takes its parameters."""
    name, file = "policies", settings.policies_file
    try:
        sensitive_content(settings.sensitive)
        tenants = {*settings.tenants, DEFAULT_TENANT}
        built = [build_tenant(tenant, settings) for tenant in sorted(tenants)]
        pipelines = load_policies(file).describe() if file is not None else {}
    except (PolicyError, OptionError, ValueError) as error:
        return [
            fail(
                name,
                str(error),
                f"Mend {file or 'the setting'}: leyline policies list shows all policies and their "
                "parameters.",
            )
        ]
    if file is not None:
        return [ok(name, f"{file}: {len(pipelines)} pipelines")]
    steps = {len(tenant.policies) for tenant in built}
    return [ok(name, f"up to {max(steps)} a turn" if max(steps) else "none: nothing is edited")]


def examine_secrets(settings: Settings) -> list[Finding]:
    """Whether sessions that leave the process are encrypted, and files of secrets are there."""
    found = _missing_files(settings)
    if settings.session_store.get_secret_value() == MEMORY:
        return [*found, skip("session-secret", "sessions are in this process's memory alone")]
    if not settings.session_secret:
        return [
            *found,
            warn(
                "session-secret",
                "none: no prompt text is stored in Redis, and no other proxy can go on splicing a "
                "session",
                "Give all proxies one LEYLINE_SESSION_SECRET (openssl rand -hex 32).",
            ),
        ]
    return [*found, ok("session-secret", "sessions in Redis are encrypted")]


def examine_trace(settings: Settings) -> list[Finding]:
    """Whether spans could be exported as the settings and OpenTelemetry's variables say."""
    if settings.trace == "off":
        return [skip("trace", "no traces (trace)")]
    try:
        # Needs OpenTelemetry, an extra.
        from ..telemetry.tracing.exporting import collector_place, otlp_exporter

        if settings.trace == "console":
            return [ok("trace", "spans go to stdout")]
        otlp_exporter().shutdown()
        return [ok("trace", f"spans go to {collector_place()}, which isn't asked")]
    except ModuleNotFoundError as error:
        fix = f"{OTEL_INSTALL}, or trace: off."
        return [fail("trace", f"the package {error.name!r} is missing", fix)]
    except ValueError as error:
        return [fail("trace", str(error), "Correct the variable that it names, or trace: off.")]


def _missing_files(settings: Settings) -> list[Finding]:
    named = {"redis_ca_file": settings.redis_ca_file, "audit_key_file": settings.audit_key_file}
    return [
        fail("config", f"{name}: {path} can't be read", f"Put the file there, or correct {name}.")
        for name, path in named.items()
        if path is not None and not (path.is_file() and os.access(path, os.R_OK))
    ]
