"""The page's files: they hold no data, so anyone who reaches the port may have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files

INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

SECURITY_HEADERS = {
    # Nothing inline, nothing from other origins, and no markup made from strings.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file."""

    body: bytes
    media_type: str
    etag: str


def read_assets() -> Mapping[str, Asset]:
    """Return the files of the package by name."""
    found: dict[str, Asset] = {}
    for entry in (files(__package__) / "static").iterdir():
        media_type = _TYPES.get(f".{entry.name.rpartition('.')[2]}")
        if media_type is not None:
            body = entry.read_bytes()
            found[entry.name] = Asset(body, media_type, f'"{sha256(body).hexdigest()[:16]}"')
    return found
