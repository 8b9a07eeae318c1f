"""The sockets of ``leyline serve``, and the reasons for which there is none."""

from __future__ import annotations

import errno
import socket


class ListenError(Exception):
    """A socket can't listen where it should; the text names the fix."""


def listen(host: str, port: int, flag: str) -> socket.socket:
    """Return a socket that is bound to an address.

    Args:
        flag: the setting of the port: ``--port`` or ``--admin-port``.

    Raises:
        ListenError: the address is taken, or isn't this machine's, or a name that nobody knows.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        why = f"Can't listen on {place} ({error.strerror})."
        raise ListenError(f"{why} {_fix(error, host, port, flag)}") from error
    return sock


def _fix(error: OSError, host: str, port: int, flag: str) -> str:
    host_flag = flag.replace("port", "host")
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return (
            f"{host} is no address of this machine. {host_flag} 0.0.0.0 takes all of its "
            f"addresses, {host_flag} 127.0.0.1 calls from this machine alone."
        )
    if error.errno == errno.EADDRINUSE:
        return (
            f"Another program listens there, maybe another proxy: stop it (ss -ltnp shows it), "
            f"or take another port: {flag} {port + 1 if port < 65535 else 8790}, or {flag} 0 for a "
            "free one."
        )
    if error.errno == errno.EACCES:
        return f"Ports below 1024 need a privilege. {flag} 8790 needs none."
    return f"{flag} 0 takes a free port."
