"""Commands that ask a proxy by its URL, over HTTPS with clients' certificates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_engine import FakeEngine
from support.sockets import SocketProxy, socket_proxy
from support.tls_place import TlsPlace
from typer.testing import CliRunner, Result

from leyline_proxy.cli import build_app

PROVE = ("audit", "prove", "--session", "s", "--proxy")
DOCTOR = ("doctor",)


@pytest.fixture
def place(tmp_path: Path) -> TlsPlace:
    """Certificates of all sides."""
    return TlsPlace(tmp_path)


@pytest.fixture
def proxy(place: TlsPlace) -> Iterator[SocketProxy]:
    """A proxy that asks for clients' certificates."""
    with socket_proxy(FakeEngine(), **place.settings()) as found:
        yield found


def run(*arguments: object) -> Result:
    """Result of a command of ``leyline``."""
    return CliRunner().invoke(build_app(), [*map(str, arguments)])


@pytest.mark.parametrize("command", [DOCTOR, PROVE])
def test_a_command_shows_a_certificate(
    proxy: SocketProxy, place: TlsPlace, command: tuple[str, ...]
) -> None:
    """Each refusal names the flag that is missing; with all of them, the proxy answers."""
    pair = place.authority.issue("spiffe://td/agents/red")
    stranger = run(*command, proxy.origin)
    assert "its certificate isn't trusted" in stranger.output and "--ca" in stranger.output
    nobody = run(*command, proxy.origin, "--ca", place.authority.ca)
    assert "it refuses this client" in nobody.output and "--client-cert" in nobody.output
    own = ("--client-cert", pair.cert, "--client-key", pair.key)
    known = run(*command, proxy.origin, "--ca", place.authority.ca, *own)
    assert ("Capability" if command == DOCTOR else "No such session") in known.output
    assert stranger.exit_code == nobody.exit_code == (1 if command == DOCTOR else 2)


@pytest.mark.parametrize("command", [DOCTOR, PROVE])
def test_files_that_cannot_serve_are_named_by_their_flags(
    place: TlsPlace, command: tuple[str, ...]
) -> None:
    """In front of any request, with exit code 2."""
    missing = run(*command, "https://127.0.0.1:1", "--ca", "/nowhere.pem")
    assert (missing.exit_code, "--ca /nowhere.pem can't be read" in missing.output) == (2, True)
    for flag, file in (("--client-cert", place.own.cert), ("--client-key", place.own.key)):
        half = run(*command, "https://127.0.0.1:1", flag, file)
        assert (half.exit_code, "need each other" in half.output) == (2, True)
