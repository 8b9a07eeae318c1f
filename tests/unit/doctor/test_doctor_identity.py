"""The doctor's look at the identity provider."""

from __future__ import annotations

import time
from collections.abc import Iterator
from email.utils import formatdate

import pytest
from support.provider import Provider, provider

from leyline_proxy.doctor.findings import Status
from leyline_proxy.doctor.identity import examine_identity
from leyline_proxy.settings import Settings


@pytest.fixture
def idp() -> Iterator[Provider]:
    """A provider."""
    with provider() as running:
        yield running


async def statuses(idp: Provider, **settings: object) -> list[tuple[Status, str]]:
    """The findings about a provider."""
    given = {"oidc_issuer": idp.origin, "oidc_audience": "leyline", **settings}
    found = await examine_identity(Settings.model_validate(given))
    return [(each.status, each.detail) for each in found]


async def test_a_good_provider_is_well(idp: Provider) -> None:
    """Its keys are counted and named."""
    ((status, detail),) = await statuses(idp, tenants={"red": {}})
    assert status is Status.OK and "1 keys" in detail and "k1" in detail


async def test_tenants_that_only_a_mapping_names_are_told(idp: Provider) -> None:
    """A name with a typo would be a tenant with the proxy's own limits."""
    mapped = {"search": "red", "batch": "redd"}
    _, (status, detail) = await statuses(idp, tenants={"red": {}}, oidc_tenants=mapped)
    assert status is Status.WARN and detail.endswith(": redd")
    assert len(await statuses(idp, oidc_tenants=mapped)) == 1


async def test_what_is_wrong_is_told(idp: Provider) -> None:
    """A clock ten minutes off, no tenants, no keys, and no provider in the settings."""
    idp.date = formatdate(time.time() - 600, usegmt=True)
    (first, clock, tenants) = await statuses(idp)
    assert first[0] is Status.OK
    assert (clock[0] is Status.WARN and "-600 s" in clock[1]) or "-601 s" in clock[1]
    assert tenants[0] is Status.FAIL
    idp.status = 404
    ((status, detail),) = await statuses(idp)
    assert status is Status.FAIL and "answers 404" in detail
    ((status, _),) = [(each.status, "") for each in await examine_identity(Settings())]
    assert status is Status.SKIP
