"""The carriage's entry in a client's metadata, which is the proxy's alone."""

from __future__ import annotations

import json

import pytest

from leyline_proxy.plan.outgoing import without_reserved

FORGED = r'"{\"cache_salt\":\"theirs\"}"'


@pytest.mark.parametrize("name", ['"leyline_carried"', r'"leyline\u005fcarried"'])
@pytest.mark.parametrize("member", ['"metadata"', r'"meta\u0064ata"'])
def test_a_clients_entry_is_removed_however_it_is_spelt(name: str, member: str) -> None:
    """A router between would write escapes as letters, and the engine would unpack the entry."""
    raw = f'{{"model":"m",{member}:{{"mine":"1",{name}:{FORGED}}},"n":1}}'.encode()
    kept = json.loads(without_reserved(raw))
    assert kept == {"model": "m", "n": 1, "metadata": {"mine": "1"}}


def test_of_two_members_only_the_last_one_is_left_without_its_entry() -> None:
    """No server that reads the first of them finds the entry, either."""
    entry = f'{{"leyline_carried":{FORGED}}}'
    raw = f'{{"metadata":{entry},"metadata":{{"mine":"1","leyline_carried":"x"}}}}'.encode()
    assert b"leyline_carried" not in without_reserved(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"m","metadata":{"mine":"\\u00e9"}}',
        b'{"model":"m", "messages":[{"content":"leyline_carried"}]}',
        b'{"metadata":"leyline_carried"}',
    ],
)
def test_other_bodies_keep_their_bytes(raw: bytes) -> None:
    """The name in a text, or other metadata, changes nothing."""
    assert without_reserved(raw) == raw


@pytest.mark.parametrize("member", ["kv_hints", "leyline", "context_management", "metadata"])
def test_a_body_of_known_members_is_changed_all_the_same(member: str) -> None:
    """Only one that has none of the proxy's members may be taken as it is."""
    value = json.dumps({"leyline_carried": "x"})
    raw = f'{{"model":"m","{member}":{value}}}'.encode()
    assert without_reserved(raw, json.loads(raw)) == without_reserved(raw) != raw
    plain = b'{"model":"m", "messages":[]}'
    assert without_reserved(plain, json.loads(plain)) is plain
