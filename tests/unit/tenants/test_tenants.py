"""Tenants: keys, effective rules, and faults at start-up."""

from __future__ import annotations

import pytest

from leyline_policies import SpecError
from leyline_proxy.errors import UnauthorizedError
from leyline_proxy.model.fields import OptionError
from leyline_proxy.settings import Settings
from leyline_proxy.tenants import build_directory


def test_without_keys_everybody_is_the_default_tenant() -> None:
    """An open proxy ignores whatever key the SDK insists on sending."""
    directory = build_directory(Settings(policy="keep_all"))
    assert directory.open
    tenant = directory.authenticate({"authorization": "Bearer whatever"})
    assert (tenant.name, [policy.name for policy in tenant.policies]) == ("default", ["keep_all"])


def test_tenants_override_what_they_set() -> None:
    """Unset values are the proxy's, set ones the tenant's own, also when they say no."""
    settings = Settings(
        policy="keep_all",
        undeclared={"tool": "amortize"},
        api_keys=["red:kr"],
        tenants={"blue": {"api_keys": ["kb"], "policy": "", "allow_request_policy": False}},
    )
    directory = build_directory(settings)
    red = directory.authenticate({"authorization": "Bearer kr"})
    blue = directory.authenticate({"authorization": "bearer kb"})
    assert (len(red.policies), red.allow_request_policy) == (1, True)
    assert (len(blue.policies), blue.allow_request_policy) == (0, False)
    assert red.undeclared == blue.undeclared
    assert red.undeclared.roles == {"tool"}


@pytest.mark.parametrize("headers", [{}, {"authorization": "kr"}, {"api-key": "k"}])
def test_other_keys_open_nothing(headers: dict[str, str]) -> None:
    """A missing scheme, a prefix of a key and no key are all unauthorized."""
    directory = build_directory(Settings(api_keys=["red:kr"]))
    with pytest.raises(UnauthorizedError):
        directory.authenticate(headers)


def test_faults_show_at_start_up() -> None:
    """A mistyped policy or rule is reported before the first request."""
    with pytest.raises(SpecError, match="truncate_older_than"):
        build_directory(Settings(policy="truncate_older"))
    with pytest.raises(OptionError):
        build_directory(Settings(undeclared={"wizard": "amortize"}))
