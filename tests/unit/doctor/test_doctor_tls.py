"""``leyline doctor`` on certificates."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support.certificates import Authority
from support.fake_engine import FakeEngine
from support.sockets import socket_proxy

from leyline_proxy.doctor.findings import Status
from leyline_proxy.doctor.machine import examine_ports
from leyline_proxy.doctor.reasoning import examine_reasoning
from leyline_proxy.doctor.tls import examine_tls
from leyline_proxy.settings import Settings

DAY = timedelta(days=1)


@pytest.mark.parametrize(
    ("begins", "ends", "status", "told"),
    [
        (-1, 9, Status.OK, "serves for another 9.0 days"),
        (-60, 13, Status.WARN, "less than a fifth of its lifetime"),
        (-90, 15, Status.OK, "serves for another 15.0 days"),
        (-351, 13.9, Status.WARN, "expires in 13.9 days"),
        (-2, -1, Status.FAIL, "has expired"),
        (1, 2, Status.FAIL, "isn't valid yet"),
    ],
)
def test_a_certificates_time_is_told(
    tmp_path: Path, begins: int, ends: float, status: Status, told: str
) -> None:
    """In days, and as a share of its lifetime, which may be an hour."""
    pair = Authority(tmp_path).issue("proxy.example", begins=begins * DAY, ends=ends * DAY)
    (found,) = examine_tls(Settings(tls_cert=pair.cert, tls_key=pair.key))
    assert (found.status, told in found.detail) == (status, True), found


@pytest.mark.parametrize("clients", [False, True])
async def test_the_own_proxy_is_recognised_by_its_certificate(
    tmp_path: Path, *, clients: bool
) -> None:
    """Also where a client's certificate is needed. One with another certificate may be this proxy
    with an older file, and is asked nothing."""
    authority = Authority(tmp_path)
    past = {"begins": -2 * DAY, "ends": -DAY} if not clients else {}
    own, other = authority.issue("proxy.example", **past), authority.issue("proxy.example")
    for pair in (own, other):  # with its authority, as chains often are
        pair.cert.write_text(pair.cert.read_text() + authority.ca.read_text())
    given: dict[str, Any] = {"tls_client_ca": authority.ca} if clients else {}
    with socket_proxy(FakeEngine(), tls_cert=own.cert, tls_key=own.key, **given) as proxy:
        host, port = proxy.address
        place: dict[str, Any] = {"host": host, "port": port}
        for pair, detail in ((own, "a Leyline proxy"), (other, "something listens on")):
            settings = Settings(**place, tls_cert=pair.cert, tls_key=pair.key, **given)
            (found,) = await examine_ports(settings)
            assert found.detail.startswith(detail)
            (found,) = await examine_reasoning(settings)
            assert found.status is (Status.OK if pair is own else Status.SKIP)


def test_nothing_to_check_without_files() -> None:
    """The finding names the settings."""
    (found,) = examine_tls(Settings(upstream="https://engine.example"))
    assert found.status is Status.SKIP
    assert "tls_cert" in found.detail


def test_engines_in_the_clear_are_named(tmp_path: Path) -> None:
    """A certificate for engines is of no use on plain HTTP; a broken file is a failure."""
    authority = Authority(tmp_path)
    pair = authority.issue("spiffe://td/proxy")
    given: dict[str, Any] = {
        "upstreams": {"plain": "http://a.example", "good": "https://b.example"},
        "upstream_tls_ca": authority.ca,
        "upstream_tls_cert": pair.cert,
        "upstream_tls_key": pair.key,
    }
    serves, clear = examine_tls(Settings(**given))
    assert (serves.status, clear.status) == (Status.OK, Status.WARN)
    assert "requests to plain go" in clear.detail
    pair.key.write_text("nothing")
    broken, _ = examine_tls(Settings(**given))
    assert broken.status is Status.FAIL
    assert "upstream_tls_key" in broken.detail


def test_tenants_that_only_certificates_name_are_told(tmp_path: Path) -> None:
    """They have the proxy's own limits; a file of keys may know them."""
    authority = Authority(tmp_path)
    pair = authority.issue("proxy.example")
    given: dict[str, Any] = {
        "tls_cert": pair.cert,
        "tls_key": pair.key,
        "tls_client_ca": authority.ca,
        "tls_tenants": {"spiffe://td/a": "red", "spiffe://td/b": "redd"},
        "tenants": {"red": {}},
    }
    _, found = examine_tls(Settings(**given))
    assert found.status is Status.WARN and found.detail.endswith(": redd")
    keys = tmp_path / "keys"
    keys.write_text("redd:key-of-redd")
    assert len(examine_tls(Settings(**given, api_keys_file=keys))) == 1
