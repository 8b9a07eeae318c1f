"""An error about a name says which rule the name breaks, wherever names have rules."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from leyline_engine.contract.claim import Claim, ClaimError
from leyline_policies import Registry
from leyline_proxy.claims.documents import ClaimBodyError, read_claim
from leyline_proxy.cli.policy_scaffold import ScaffoldError, write_package
from leyline_proxy.model.fields import GROUP_PATTERN, SHARE_PATTERN, OptionError
from leyline_proxy.model.name_rule import NameRule, rule_of
from leyline_proxy.request.options import parse_options
from leyline_proxy.settings import Settings
from leyline_proxy.settings.api_keys import KeyLineError, check_tenant
from leyline_proxy.settings.faults import Sources, faults_of

LONG = "n" * 68


def setting(**given: Any) -> str:
    """The faults of settings."""
    with pytest.raises(ValidationError) as caught:
        Settings(**given)
    return " ".join(map(str, faults_of(caught.value, Sources())))


def engines(name: str) -> str:
    """The faults of an engine's name."""
    return setting(upstreams={name: {"url": "http://gpu"}})


def test_a_setting_says_its_length_or_its_character() -> None:
    """A name of 68 characters that are all allowed is too long, and so says its error."""
    assert f"'{LONG}' has 68 characters, and needs 1 to 64" in engines(LONG)
    assert "has '/' at place 2; use only letters, digits and . _ : -" in engines("a/b")
    assert "has 0 characters" in engines("")
    assert "has 70 characters, and needs 1 to 64" in setting(redis_prefix="p" * 70)
    assert "redis_prefix has ' ' at place 2" in setting(redis_prefix="a b")
    assert "audit_instance has '\\xfc' at place 1" in setting(audit_instance="ü")
    tenant = {"red": {"reuse_groups": ["good", "g" * 129]}}
    assert "has 129 characters" in setting(tenants=tenant)
    assert "has 65 characters" in setting(affinity_header="h" * 65)
    assert "has ':' at place 2" in setting(affinity_header="a:b")


def test_a_request_says_its_length_or_its_character() -> None:
    """So do names in requests, and members of lists of them; a value that is no text gets the
    converter's words."""
    for options, said in (
        ({"share": "s" * 129}, "leyline.share has 129 characters, and needs 0 to 128"),
        ({"share": "a b"}, "leyline.share has ' ' at place 2"),
        ({"reuse_groups": ["good", "bad one"]}, "has ' ' at place 4"),
        ({"share": 7}, "Expected `str"),
    ):
        with pytest.raises(OptionError) as caught:
            parse_options(options, max_edits=9)
        assert said in str(caught.value)
    predicate = {"messages": [0, 1]}
    for name, said in (("c" * 129, "id: has 129 characters"), ("a/b", "id: has '/' at place 2")):
        with pytest.raises(ClaimBodyError, match=said):
            read_claim({"session": "s", "id": name, "predicate": predicate})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("p" * 49, "has 49 characters"),
        ("Short", "has 'S' at place 1; use only small letters"),
        ("1st", "begins with '1'"),
        ("class", "is a word of Python's own"),
    ],
)
def test_a_new_policy_says_what_its_name_lacks(tmp_path: Any, name: str, said: str) -> None:
    """The command that writes a package refuses names that can't be a module's."""
    with pytest.raises(ScaffoldError, match=said):
        write_package(name, tmp_path, Registry([]))


def test_a_tenant_and_an_engine_say_it_too() -> None:
    """Key files and the engine's own check of claims."""
    with pytest.raises(KeyLineError, match="has 65 characters, and needs 1 to 64"):
        check_tenant("t" * 65)
    with pytest.raises(KeyLineError, match="has '#' at place 2; use only characters that are no"):
        check_tenant("a#")
    assert check_tenant("größe") == "größe"
    facts: dict[str, Any] = {"tenant": "t", "session": "s", "predicate": None, "kind": None}
    for name, said in (("c" * 200, "and has 200"), ("a b", "and has others")):
        with pytest.raises(ClaimError, match=said):
            Claim(id=name, **facts)


def test_patterns_are_read_and_a_name_is_not_quoted() -> None:
    """Each pattern of settings and requests is a rule; an error quotes one character at most."""
    for pattern in (SHARE_PATTERN, GROUP_PATTERN, "^[A-Z]{3}$", r"^[A-Za-z0-9._-]{0,64}$"):
        rule = rule_of(pattern)
        assert rule is not None
        assert rule.broken("A" * rule.least if rule.least else "") is None
        assert "secret" not in str(rule.broken("secret\nsecret"))
    assert rule_of("^(a|b)$") is None
    assert NameRule("[a-z]", "small letters", 3, 3).broken("ab") == "has 2 characters, and needs 3"
