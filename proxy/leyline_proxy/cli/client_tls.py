"""TLS of commands that ask a running proxy or an engine."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Annotated, Any

import typer


def _file(flag: str, variable: str, text: str) -> Any:
    """Return the option for a file, which a variable may name, too."""
    return typer.Option(flag, envvar=variable, help=text, show_envvar=False)


Ca = Annotated[
    Path | None,
    _file(
        "--ca",
        "LEYLINE_CLIENT_CA",
        "PEM file of the authorities that sign the server's certificate \\[the system's].",
    ),
]
Cert = Annotated[
    Path | None,
    _file(
        "--client-cert",
        "LEYLINE_CLIENT_CERT",
        "PEM file of the certificate to show, where the server asks for one.",
    ),
]
Key = Annotated[Path | None, _file("--client-key", "LEYLINE_CLIENT_KEY", "Key of --client-cert.")]


def context_of(ca: Path | None, cert: Path | None, key: Path | None) -> ssl.SSLContext | bool:
    """Return the TLS context of these flags, as httpx's ``verify``; True without any.

    Raises:
        leyline_proxy.tls.files.TlsFilesError: a file can't serve.
    """
    if ca is cert is key is None:
        return True
    from ..tls.contexts import for_engines
    from ..tls.files import TlsFiles, TlsFilesError

    if (cert is None) != (key is None):
        raise TlsFilesError("--client-cert and --client-key need each other")
    return for_engines(TlsFiles(cert, key, ca, ("--client-cert", "--client-key", "--ca")))


def tls_refusal(error: BaseException) -> str:
    """Return the reason that a server's TLS failed, and the flag that helps; empty if it wasn't
    TLS."""
    from ..errors import causes_of

    for each in causes_of(error):
        if isinstance(each, ssl.SSLCertVerificationError):
            why = getattr(each, "verify_message", "") or str(each)
            return f"its certificate isn't trusted ({why}); --ca takes its authorities"
        if isinstance(each, ssl.SSLError):
            reason = (each.reason or "no reason given").lower().replace("_", " ")
            if "alert" not in reason:
                return f"TLS failed ({reason}); does the server speak HTTPS on this port?"
            return f"it refuses this client ({reason}); --client-cert shows a certificate"
    return ""
