"""Addresses that ``leyline serve`` can't listen on, and what it says about them."""

from __future__ import annotations

import re
import socket

import pytest

from leyline_proxy.cli.serve import ListenError, listen


def test_a_taken_port_names_another() -> None:
    """The fix names the next port and the free one, and the next port is a port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=r"Another program.*--port 0") as raised:
            listen("127.0.0.1", port, "--port")
    (other,) = re.findall(r"another port: --port (\d+)", str(raised.value))
    assert other == str(port + 1) if port < 65535 else "8790"


@pytest.mark.parametrize("host", ["203.0.113.7", "2001:db8::7"])
def test_an_address_of_another_machine_is_named(host: str) -> None:
    """No port helps: the fix is another host, by the flag of the socket's own."""
    with pytest.raises(ListenError, match=f"{host} is no address of this machine") as raised:
        listen(host, 0, "--admin-port")
    assert "--admin-host 0.0.0.0" in str(raised.value)
    assert "port 0" not in str(raised.value)


def test_a_free_port_is_bound() -> None:
    """Port 0 gives a port."""
    with listen("127.0.0.1", 0, "--port") as sock:
        assert sock.getsockname()[1] > 0
