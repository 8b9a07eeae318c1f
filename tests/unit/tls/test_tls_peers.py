"""Names in certificates, and the tenants that they stand for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_proxy.settings import Settings
from leyline_proxy.tls.peers import MAX_NAMES, matches, names_of, tenants_named

PARTS = st.lists(st.sampled_from(["a", "b", "agents", "red"]), min_size=1, max_size=4)


@given(PARTS, PARTS)
def test_a_pattern_stands_for_what_lies_below_it(above: list[str], below: list[str]) -> None:
    """A path of the pattern's own parts and at least one more fits, and nothing else does."""
    pattern = f"spiffe://{'/'.join(above)}/*"
    fits = len(below) > len(above) and below[: len(above)] == above
    assert matches(pattern, f"spiffe://{'/'.join(below)}") is fits


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("spiffe://td/agents/*", "spiffe://td/agents"),
        ("spiffe://td/agents/*", "spiffe://td/agents/"),
        ("spiffe://td/agents/*", "spiffe://td/agentsmith/a"),
        ("spiffe://td/agents/a", "spiffe://td/agents/A"),
        ("spiffe://td/agents/a", "spiffe://td/agents/a/b"),
        ("engine.example", "evil.engine.example"),
        ("engine.example", "engine.example.evil"),
    ],
)
def test_names_that_only_look_alike_fit_nothing(pattern: str, name: str) -> None:
    """Neither a sibling, nor another case, nor a longer name."""
    assert not matches(pattern, name)


def test_the_longest_pattern_decides() -> None:
    """One team's path may lie below another's; a certificate of two tenants names both."""
    tenants = {"spiffe://td/*": "all", "spiffe://td/red/*": "red", "spiffe://td/red/x": "x"}
    found = [
        sorted(tenants_named(names, tenants))
        for names in (
            ("spiffe://td/blue",),
            ("spiffe://td/red/a",),
            ("spiffe://td/red/x",),
            ("spiffe://td/blue", "spiffe://td/red/a"),
            ("spiffe://other/red/a", "red.example"),
            (),
        )
    ]
    assert found == [["all"], ["red"], ["x"], ["all", "red"], [], []]


def test_only_uris_and_dns_names_count_and_not_endlessly_many() -> None:
    """Addresses and mail names are nobody's, nor is the common name."""
    certificate = {
        "subject": ((("commonName", "red"),),),
        "subjectAltName": (
            ("IP Address", "10.0.0.1"),
            ("email", "red@example"),
            *(("DNS", f"{number}.example") for number in range(200)),
            ("URI", "spiffe://td/late"),
        ),
    }
    assert names_of(certificate) == tuple(f"{number}.example" for number in range(MAX_NAMES))
    assert names_of({}) == names_of(None) == ()


def test_a_workload_has_one_name() -> None:
    """A certificate with a SPIFFE ID and a second URI is nobody's."""
    red, other = ("URI", "spiffe://td/red"), ("URI", "https://red.example")
    assert names_of({"subjectAltName": (red, ("DNS", "red.example"))}) == (red[1], "red.example")
    assert names_of({"subjectAltName": (red, other)}) == ()
    assert names_of({"subjectAltName": (other, ("URI", "https://b.example"))}) != ()


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"tls_cert": "a.pem"}, "tls_cert and tls_key need each other"),
        ({"upstream_tls_key": "a.key"}, "upstream_tls_cert and upstream_tls_key need each other"),
        ({"tls_client_ca": "ca.pem"}, "tls_client_ca needs tls_cert"),
        ({"tls_clients": "required"}, "tls_clients needs tls_client_ca"),
        ({"tls_tenants": {"spiffe://td/a": "red"}}, "tls_tenants needs tls_client_ca"),
        ({"upstream_tls_names": "*"}, "is no name of a certificate"),
        ({"upstream_tls_names": "spiffe://td/a*"}, "is no name of a certificate"),
        ({"upstream_tls_names": "spiffe://*"}, "is no name of a certificate"),
        ({"tls_tenants": {"": "red"}}, "is no name of a certificate"),
    ],
)
def test_settings_that_contradict_each_other_are_named(
    given: dict[str, object], fault: str
) -> None:
    """The message has the settings; a pattern that stands for everyone is none."""
    with pytest.raises(ValueError, match=fault.replace("*", r"\*")):
        Settings(**given)
