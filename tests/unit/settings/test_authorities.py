"""The hosts that mean a proxy without keys, and the pages that may speak to it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_proxy.settings.authorities import allowed_hosts, parse_authority

HOME = allowed_hosts("127.0.0.1", ["gpu1", "ui.example.com", "localhost:3000"])
EVERYWHERE = allowed_hosts("0.0.0.0", ["leyline"])  # noqa: S104
LAN = allowed_hosts("192.168.1.5", [])
LOOPBACK = ["localhost", "LocalHost.", "127.0.0.1", "127.8.9.10", "[::1]", "[::ffff:127.0.0.1]"]


def allows(hosts: object, text: str) -> bool:
    found = parse_authority(text)
    return found is not None and hosts.allows(found)  # type: ignore[attr-defined]


@given(st.sampled_from(LOOPBACK), st.sampled_from(["", ":80", ":8790", ":65535"]))
def test_this_machine_is_always_meant(name: str, port: str) -> None:
    """It is meant by each of its loopback names, at any port, wherever the proxy listens."""
    assert all(allows(hosts, name + port) for hosts in (HOME, EVERYWHERE, LAN))


@given(
    st.sampled_from([*LOOPBACK, "gpu1", "leyline", "192.168.1.5"]),
    st.sampled_from([".evil.test", "@evil.test", "/evil.test", "#evil", "?x", " evil.test", ":x"]),
    st.booleans(),
)
def test_a_name_that_only_looks_like_one_of_these_is_foreign(
    name: str, other: str, before: bool
) -> None:
    """A page's own name may contain anything, and stays foreign."""
    text = f"{other[1:]}{other[0]}{name}" if before else name + other
    assert not any(allows(hosts, text) for hosts in (HOME, EVERYWHERE, LAN))


@pytest.mark.parametrize("text", ["", ":80", "a:", "a:b", "a:123456", "[::1", "::1", "[a]", "[]"])
def test_what_is_no_host_means_nothing(text: str) -> None:
    """A malformed header is as foreign as a foreign name."""
    assert not any(allows(hosts, text) for hosts in (HOME, EVERYWHERE, LAN))


def test_an_address_is_taken_where_the_proxy_listens_at_it() -> None:
    """No page can have an address point elsewhere; at one's own alone where there is but one."""
    assert allows(EVERYWHERE, "10.1.2.3:8790") and allows(EVERYWHERE, "[fd00::1]:8790")
    assert allows(LAN, "192.168.1.5:8790") and not allows(LAN, "10.1.2.3")
    assert not allows(HOME, "10.1.2.3") and not allows(HOME, "0.0.0.0")  # noqa: S104
    assert allows(allowed_hosts("fd00::1", []), "[fd00::1]:80")
    assert allows(allowed_hosts("gpu1", []), "GPU1:80")


def test_a_port_that_is_named_is_meant_alone() -> None:
    """A name without one covers all of them."""
    hosts = allowed_hosts("127.0.0.1", ["a", "b:1"])
    assert allows(hosts, "a") and allows(hosts, "A:2") and allows(hosts, "b:1")
    assert not allows(hosts, "b") and not allows(hosts, "b:2")


@pytest.mark.parametrize(
    ("origin", "host", "trusted"),
    [
        ("http://localhost:8790", "localhost:8790", True),
        ("http://LOCALHOST", "localhost:80", True),
        ("https://[::1]", "[::1]", True),
        ("http://127.0.0.1:8790", "localhost:8790", False),
        ("http://localhost:5173", "localhost:8790", False),
        ("http://127.0.0.1:5173", "127.0.0.1:8790", False),
        ("http://localhost", "localhost:8790", False),
        ("https://ui.example.com", "localhost:8790", True),
        ("http://ui.example.com:80", "localhost:8790", True),
        ("http://ui.example.com:8080", "localhost:8790", False),
        ("http://localhost:3000", "localhost:8790", True),
        ("http://gpu1:8790", "gpu1:8790", True),
        ("chrome-extension://abc", "localhost:8790", False),
        ("chrome-extension://gpu1", "localhost:8790", True),
        ("https://evil.test", "localhost:8790", False),
        ("null", "localhost:8790", False),
        ("", "localhost:8790", False),
        ("http://", "localhost:8790", False),
        ("http://localhost:8790/x", "localhost:8790", False),
        ("http://localhost:8790, http://evil.test", "localhost:8790", False),
    ],
)
def test_a_page_is_trusted_that_is_the_proxys_own_or_named(
    origin: str, host: str, trusted: bool
) -> None:
    """Another port of the same machine is another site; a name without a port is the scheme's."""
    assert HOME.trusts(origin, parse_authority(host)) is trusted


@given(st.text(max_size=60))
def test_any_text_is_read_without_a_fault(text: str) -> None:
    """Any client that writes headers decides their content."""
    found = parse_authority(text)
    assert found is None or EVERYWHERE.allows(found) in (True, False)
    assert HOME.trusts(f"http://{text}", found) in (True, False)
    assert HOME.trusts(text, None) is False or "://" in text
