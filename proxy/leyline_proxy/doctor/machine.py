"""Checks of this machine: ports, open files, memory, the audit log's disk, installed packages."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import resource
import shutil
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import httpx

from ..audit.files import AuditError, beside, survey
from ..errors import causes_of
from ..installing import PACKAGE, REPLAY_ENGINE, package_problems, pip_install
from ..settings import Settings
from ..settings.audit import PLACE
from ..settings.sessions import MEMORY
from ..telemetry.metrics import Metrics
from ..telemetry.processes import memory_limit
from ..wiring.audit import build_auditor
from ..wiring.recall import recalls
from .findings import Finding, fail, ok, skip, warn
from .own_proxy import OtherCertificateError, client_for, origin_of
from .reaching import document

_MIB = 1024 * 1024
_SPARE_FILES = 128
"""Files for libraries, logs, and libraries' own sockets."""
_FULL = 0.8
_LITTLE_DISK = 64 * _MIB
_ANSWER_S = 2.0


class Occupant(Enum):
    """A process that listens where the proxy wants to."""

    PROXY = auto()
    """A Leyline proxy of these settings."""
    OTHER_CERTIFICATE = auto()
    """Something that speaks TLS, with another certificate than these settings'."""
    OTHER = auto()


@dataclass(frozen=True, slots=True)
class PortFacts:
    """Result of an attempt to listen."""

    flag: str
    host: str
    port: int
    problem: str = ""
    """Empty if the port is free."""
    occupant: Occupant | None = None
    """The process that listens there already."""


async def examine_ports(settings: Settings) -> list[Finding]:
    """Check that the proxy can listen on its ports."""
    wanted = [("--port", settings.host, settings.port)]
    if settings.admin_port is not None:
        wanted.append(("--admin-port", settings.admin_host, settings.admin_port))
    found = []
    for flag, host, port in wanted:
        facts = try_port(flag, host, port)
        if facts.occupant is not None:
            facts = replace(facts, occupant=await _occupant(settings, host, port))
        found.append(port_verdict(facts))
    return found


def port_verdict(facts: PortFacts) -> Finding:
    """Return the finding for the attempt."""
    name = facts.flag.removeprefix("--")
    where = f"{facts.host}:{facts.port}"
    if not facts.problem:
        return ok(name, f"{where} is free" if facts.port else f"{facts.host}, a free port")
    if facts.occupant is Occupant.PROXY:
        return warn(
            name,
            f"a Leyline proxy already listens on {where}",
            f"This is fine if it is your proxy; a second proxy needs another {facts.flag}.",
        )
    if facts.occupant is Occupant.OTHER_CERTIFICATE:
        return warn(
            name,
            f"something listens on {where} whose certificate isn't that of the file tls_cert",
            "This is fine if it is your proxy, and the file is newer: the proxy's log says whether "
            f"it took it (tls_loaded, tls_refused). Another program needs another {facts.flag}.",
        )
    if facts.occupant is Occupant.OTHER:
        return fail(
            name,
            f"another program listens on {where}",
            f"Stop it (ss -ltnp 'sport = :{facts.port}' names it), or choose another "
            f"{facts.flag}; 0 takes a free port.",
        )
    return fail(
        name,
        f"can't listen on {where} ({facts.problem})",
        f"Choose an address of this machine and a port above 1023 for {facts.flag}.",
    )


def try_port(flag: str, host: str, port: int) -> PortFacts:
    """Listen there for a moment."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        # As in the proxy: closing connections don't count.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
            sock.listen(1)
        except OSError as error:
            occupant = Occupant.OTHER if error.errno == errno.EADDRINUSE else None
            problem = error.strerror or type(error).__name__
            return PortFacts(flag, host, port, problem, occupant)
    return PortFacts(flag, host, port)


async def _occupant(settings: Settings, host: str, port: int) -> Occupant:
    found = Occupant.OTHER
    async with client_for(settings, origin_of(settings, host, port), timeout_s=_ANSWER_S) as client:
        for path, member in (("/readyz", "upstreams"), ("/healthz", "status")):
            try:
                answer = await document(client, path)
            except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError, ValueError) as error:
                if any(isinstance(each, OtherCertificateError) for each in causes_of(error)):
                    found = Occupant.OTHER_CERTIFICATE
                continue
            if isinstance(answer, dict) and member in answer:
                return Occupant.PROXY
    return found


def examine_files(settings: Settings) -> list[Finding]:
    """Check that the process may open enough files for its connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [files_verdict(soft, hard, settings)]


def files_verdict(soft: int, hard: int, settings: Settings) -> Finding:
    """Return the finding for the limit of open files; ``RLIM_INFINITY`` means unlimited."""
    name, detail = "open-files", f"{soft:,} open files allowed"
    upstreams = settings.max_upstream_connections * max(1, len(settings.engines()))
    # Beside them, as many TLS handshakes.
    clients = settings.max_connections * (2 if settings.tls_cert is not None else 1)
    most = clients + upstreams + settings.redis_max_connections + _SPARE_FILES
    busy = settings.max_concurrent
    least = min(busy, settings.max_connections) + min(busy, upstreams) + _SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= most:
        return ok(name, detail if soft != resource.RLIM_INFINITY else "no limit of open files")
    fix = (
        f"ulimit -n {most} (systemd: LimitNOFILE={most}; the hard limit here is {hard:,}), or "
        "lower max_connections and max_upstream_connections."
    )
    if soft < least:
        return fail(
            name, f"{detail}; max_concurrent: {settings.max_concurrent} needs {least:,}", fix
        )
    return warn(name, f"{detail}; all connections that the settings allow need {most:,}", fix)


def examine_memory(settings: Settings) -> list[Finding]:
    """Check that the proxy's allowed memory fits into this machine."""
    return [memory_verdict(settings, memory_limit())]


def memory_verdict(settings: Settings, limit: int | None) -> Finding:
    """Compare the sum of the limits, in bytes, with the memory of the machine."""
    name = "memory"
    if limit is None:
        return skip(name, "this system doesn't report its memory")
    bounds = {
        "text_memory_bytes": settings.text_memory_bytes,
        "max_session_bytes": settings.max_session_bytes,
        "max_stored_response_bytes": settings.max_stored_response_bytes,
    }
    if recalls(settings) and settings.recall_store.get_secret_value() == MEMORY:
        bounds["recall_memory_bytes"] = settings.recall_memory_bytes
    total = sum(bounds.values())
    detail = f"limits of {total / _MIB:,.0f} MiB, {limit / _MIB:,.0f} MiB available"
    fix = f"Lower {max(bounds, key=lambda each: bounds[each])}, or give the process more memory."
    if total > limit:
        return fail(name, f"{detail}: the process would be killed before it reaches them", fix)
    if total > _FULL * limit:
        return warn(name, f"{detail}: little is left for requests in progress", fix)
    return ok(name, detail)


def examine_audit(settings: Settings) -> list[Finding]:
    """Check that the audit log can be written, and for how long."""
    name, path = "audit", settings.audit_file
    if path is None:
        return [skip(name, "the audit log is off (audit_file)")]
    try:
        build_auditor(settings, Metrics())
    except ValueError as error:
        return [fail(name, str(error), "Correct the setting, or the file that it names.")]
    instance = settings.audit_instance or socket.gethostname()[:64]
    path = path.with_name(path.name.replace(PLACE, instance))
    problem = _audit_problem(path)
    if problem is not None:
        return [problem]
    free = shutil.disk_usage(path.parent).free
    return [disk_verdict(path, free, settings.audit_max_bytes)]


def _audit_problem(path: Path) -> Finding | None:
    """Return the reason that the log can't be written there; None if it can."""
    name, folder = "audit", path.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return fail(
            name,
            f"can't create a file in {folder}",
            f"mkdir -p {folder}, and let the proxy's user write there.",
        )
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        return fail(name, f"{path} can't be written to", f"chown {path} to the proxy's user.")
    if _locked(beside(path, ".lock")):
        return warn(
            name,
            f"a proxy already writes to {path}",
            "This is fine if it is your proxy; a second proxy needs its own file "
            "({instance} in its name).",
        )
    try:
        survey(path)
    except (AuditError, OSError) as error:
        return fail(name, str(error), "Name another file as audit_file, or move this one away.")
    return None


def disk_verdict(path: Path, free: int, file_bytes: int) -> Finding:
    """Judge whether the disk has room for two more files of the log."""
    detail = f"{path}: {free / _MIB:,.0f} MiB free"
    fix = "Free up space, or limit the log with audit_max_bytes and audit_keep."
    if free < min(_LITTLE_DISK, file_bytes):
        return fail("audit", detail, fix)
    if free < 2 * file_bytes:
        return warn("audit", detail, fix)
    return ok("audit", detail)


def _locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def examine_packages(settings: Settings) -> list[Finding]:
    """Check that the installed packages are those that this release needs."""
    extras = ["proxy"] if settings.engines() else ["proxy", "engine"]
    try:
        problems = list(package_problems(PACKAGE, extras))
    except PackageNotFoundError:
        return [skip("packages", "Leyline runs from a source tree without package metadata")]
    if "engine" in extras:
        with suppress(PackageNotFoundError):  # then it is one of the problems
            problems += package_problems(REPLAY_ENGINE, ())
    detail = f"Leyline {version(PACKAGE)}, Python {platform.python_version()}"
    if problems:
        return [fail("packages", f"{detail}; {'; '.join(problems[:6])}", pip_install(*extras))]
    return [ok("packages", detail)]
