"""TLS contexts, for connections from clients and to engines, from files."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import httpx
import structlog

from .files import TlsFiles, TlsFilesError, read
from .names import matches, names_of
from .peers import checked_peer
from .refusing import RefusingContext

log = structlog.get_logger("leyline.tls")

_PROTOCOLS = ["http/1.1"]


def for_clients(files: TlsFiles, *, required: bool) -> ssl.SSLContext:
    """Return the context of a port.

    Args:
        required: True to refuse connections without a client's certificate. Without authorities,
            no certificate is asked for.

    Raises:
        TlsFilesError: a file can't serve.
    """
    context = RefusingContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(_PROTOCOLS)
    _load_own(context, files)
    if files.authorities is not None:
        _load_authorities(context, files.authorities, files.settings[2])
        context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
        # A resumed session's certificate isn't verified again. See also RefusingContext.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
    return context


def for_engines(files: TlsFiles, *, names: Sequence[str] = ()) -> ssl.SSLContext:
    """Return the context of connections to engines.

    Args:
        files: without authorities, those that httpx trusts by default are.
        names: patterns (:func:`~.names.matches`) of which an engine's certificate must fit one, in
            place of its host name; empty for the host name.

    Raises:
        TlsFilesError: a file can't serve.
    """
    if files.authorities is None:
        context = httpx.create_ssl_context()
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _load_authorities(context, files.authorities, files.settings[2])
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(_PROTOCOLS)
    if files.certificate is not None:
        _load_own(context, files)
    if names:
        # Workload certificates have no host names.
        context.check_hostname = False
        context.sslobject_class = _named_peer(tuple(names))
    return context


def _load_own(context: ssl.SSLContext, files: TlsFiles) -> None:
    certificate, key = files.certificate, files.key
    if certificate is None or key is None:
        raise TlsFilesError(f"{files.settings[0]} and {files.settings[1]} need each other.")

    def encrypted() -> NoReturn:
        raise TlsFilesError(
            f"{files.settings[1]} {key} is encrypted. Give the key without a passphrase, in a file "
            "that only the proxy can read."
        )

    read(certificate, files.settings[0])
    read(key, files.settings[1])
    try:
        context.load_cert_chain(certificate, key, password=encrypted)
    except (OSError, ValueError) as error:
        if isinstance(error, TlsFilesError):
            raise
        raise TlsFilesError(
            f"{files.settings[1]} {key} is not the key of {files.settings[0]} {certificate}, or "
            "one of them isn't in PEM."
        ) from error


def _load_authorities(context: ssl.SSLContext, path: Path, setting: str) -> None:
    read(path, setting)
    try:
        context.load_verify_locations(cafile=path)
    except (OSError, ValueError) as error:
        raise TlsFilesError(f"{setting} {path} holds no certificates in PEM.") from error


def _named_peer(patterns: tuple[str, ...]) -> type[ssl.SSLObject]:
    """Return connections that end the handshake with a peer of another name."""

    def check(connection: ssl.SSLObject) -> None:
        certificate: Any = connection.getpeercert()
        names = names_of(certificate)
        if not any(matches(pattern, name) for pattern in patterns for name in names):
            log.warning("engine_certificate_refused", names=[each[:200] for each in names])
            raise ssl.SSLCertVerificationError("its names are none of upstream_tls_names")

    return checked_peer(check)
