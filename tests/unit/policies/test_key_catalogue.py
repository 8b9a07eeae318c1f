"""The catalogue of keys finds what the documentation names, and not what only looks alike."""

from __future__ import annotations

import importlib
import re
import secrets
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from leyline_lab.policy_tables import detectors
from leyline_lab.policy_tables.key_samples import samples
from leyline_policies.builtin import catalogue
from leyline_policies.builtin.catalogue import CHECKS, load_catalogue
from leyline_policies.builtin.detectors import KEYS, load_detectors
from leyline_policies.builtin.search import Search

SEED = secrets.randbits(32)
SAMPLES = [*samples(SEED)]
DOCUMENT = (Path(__file__).parents[3] / "docs" / "policies.md").read_text("utf-8")
HEX = "3f786850e387550fdab836ed7e6dc881de23001b"
NEAR_MISSES = [
    # Sums, names and numbers that are long and random, but open nothing.
    f"commit {HEX}\nindex 83db48f..bf269f4 100644",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    '"integrity": "sha512-z4PhNX7vuL3xVChQ1m2AB9Yg5AULVxXcg/SpIdNs6c5H0NE8XYXysP+DGNKHfuwv=="',
    "550e8400-e29b-41d4-a716-446655440000",
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk",
    "golang.org/x/net v0.17.0 h1:pVaXccu2ozPjCXewfr1S7xza/zcXTity9cCdXQYSjIM=",
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl me@host",
    "-----BEGIN CERTIFICATE-----\nMIIDdzCCAl+gAwIBAgIEAgAAuTANBgkqhkiG9w0BAQUFADBaMQswCQYD\n"
    "-----END CERTIFICATE-----",
    "certificate-authority-data: LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0tCk1JSURkekNDQWwrZ0F3SUJBZ0lF",
    "ACCATCTCTACCGGTTCGCTTTCACTGGATATCGCGCTTGGGGCAGGTGG",
    "build 20260101.1 at 12:34:56: 1234567890:abc, 0x7ffee4c0a8b0",
    # Names of secrets with no secret: references, placeholders, types, code.
    "AWS_SECRET_ACCESS_KEY=$AWS_SECRET_ACCESS_KEY\nNPM_TOKEN=${NPM_TOKEN}",
    "token: ${{ secrets.NPM_TOKEN }}",
    "DB_PASSWORD=<your-password>\nAPI_KEY=your-api-key-here\nSECRET_KEY=changeme",
    "password: str = Field(default=None)\ntoken = get_token(request)",
    "MAX_TOKENS=4096\nTOKEN_LIMIT = 200000\nPAD_TOKEN = '[PAD]'",
    "API_KEY = os.environ['API_KEY']\nAPI_KEY = load_key2(a)\nSECRET = keys2['a']",
    "password = getPassword2(user)\napi_key=Key2Value[0]\naccess_token: tokenOf2.User3()",
    '{"password": "hunter", "api_key": "${API_KEY_1}", "client_secret": "{{ Secret1 }}"}',
    "PASSWORD_FILE=/run/secrets/db_password\nSECRET=/etc/secret.d/a1",
    "valueFrom:\n  secretKeyRef:\n    name: db\n    key: password",
    "aws_secret_access_key = config.get('aws')",
    "AccountKey=;SharedAccessKey=<key>",
    "Authorization: Bearer <token>\nAuthorization: Bearer $TOKEN\nAuthorization: Basic <pair>",
    "Basic dGVzdGluZzEyMw== is no pair\na Basic knowledge of auth, basic authentication",
    'curl -u "$USER:$PASSWORD" https://example.org\ncurl -u me https://example.org:8080',
    "docker run -u 1000:1000 -p 8080:80 nginx\nmysql -p -h db\nssh -p 2222 me@host",
    # Addresses.
    "http://localhost:8080/@scope/pkg\nhttps://registry.npmjs.org:443/@types/node",
    "postgres://user:${DB_PASSWORD}@db/x\nhttps://user:password@example.org\nssh://git@host:22/x.git",
    "git@github.com:o/r.git\nhttps://github.com/o/r/blob/" + HEX + "/a.py#L1-L2",
    "https://example.org/?token=&key=abc&page=2\nhttps://sub.example.org/?signature=none",
    "https://hooks.slack.com/services/\nhttps://discord.com/api/webhooks/",
    "cpe:2.3:a:acme:component_framework:-:*:*:*:*:*:*:*\n127.0.0.1:5432:5432\n0.0.0.0:5432->5432/tcp",
    # Beginnings of keys, or too short, or other letters.
    "AKIA\nAKIAabcdefghijklmnop\nghp_\nghp_short\nglpat-x\nxoxb-\nsk-\nsk-learn-is-a-name-of-a-library-in-python",
    "SG.a.b\nnpm_config_registry\nnpm_package_json\nhf_transfer\nhf_hub_download\nhvs.x\ndapi\nya29.",
    "eyJhbGciOiJIUzI1NiJ9\neyJ.eyJ.x\npat.name.x\nkey-value\nkey-0123\nSKILL\nACTION",
    "machine learning\ndefault login shell\nlogin name password prompt",
    '{"auth": "none"}\n{"auth": "oauth2client"}\n"auth": true',
    "-----BEGIN PUBLIC KEY-----\nMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE\n-----END PUBLIC KEY-----",
    "age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p",
]


def test_every_sample_is_found() -> None:
    """Nothing is left of any secret in a documented format, whatever is around it."""
    left = detectors.missed(SAMPLES)
    assert not left, f"seed {SEED}: {len(left)} missed, such as {left[0]}"


def test_what_is_around_a_secret_is_kept() -> None:
    """The secret alone is replaced, so that JSON, in JSON too, stays what it was."""
    searches = {kind: Search(load_detectors([kind])) for kind in KEYS}
    for sample in SAMPLES:
        (secret, *more) = sample.secrets
        is_coloured = "\x1b" in sample.text  # the colour in front goes, too
        if not more and not is_coloured and secret in sample.text:
            search = searches[sample.kind]
            search.begin()
            assert search.redacted(sample.text, "█") == sample.text.replace(secret, "█"), SEED


def test_every_kind_has_ten_forms() -> None:
    """Each detector of keys has samples in ten forms or more."""
    forms: dict[str, set[str]] = defaultdict(set)
    for sample in SAMPLES:
        forms[sample.kind].add(sample.form)
    assert forms.keys() == {*KEYS}
    assert min(map(len, forms.values())) >= 10


def test_samples_are_missed_without_their_detector() -> None:
    """A sample counts as found only if its secret is gone: with no detector, none is."""
    assert len(detectors.missed(SAMPLES[::50], ["iban"])) == len(SAMPLES[::50])


@pytest.mark.parametrize("text", NEAR_MISSES, ids=range(len(NEAR_MISSES)))
def test_what_only_looks_like_a_key_stays(text: str) -> None:
    """Sums, identifiers, references, placeholders and beginnings are no secrets."""
    assert Search(load_detectors(["keys"])).redacted(text, "█") == text


def test_every_rule_finds_a_sample() -> None:
    """No rule of the catalogue is there for nothing, and none goes untested."""
    texts: dict[str, list[str]] = defaultdict(list)
    for sample in SAMPLES:
        texts[sample.kind].append(sample.text)
    idle = [
        rule.source
        for kind in KEYS
        for rule, search in _searches(kind)
        if not any(search.first(text) is not None for text in texts[kind])
    ]
    assert idle == []


def _searches(kind: str) -> list[tuple[Any, Search]]:
    """The catalogue's rules of a kind, each with a search for it alone."""
    known = [rule for rule in load_catalogue() if rule.kind == kind]
    loaded = load_detectors([kind])[-len(known) :] if known else ()
    return [(rule, Search([each])) for rule, each in zip(known, loaded, strict=True)]


def test_rules_keep_to_what_engines_have_in_common() -> None:
    """No rule has look-around, back-references, atomic groups or possessive quantifiers."""
    parser = importlib.import_module("re._parser")
    foreign = {"ASSERT", "ASSERT_NOT", "GROUPREF", "GROUPREF_EXISTS", "ATOMIC_GROUP"}

    def kinds(node: Any) -> set[str]:
        if isinstance(node, parser.SubPattern | list | tuple):
            found = {name for each in node for name in kinds(each)}
            if isinstance(node, tuple) and node and hasattr(node[0], "name"):
                found.add(node[0].name)
            return found
        return set()

    for rule in load_catalogue():
        for text in filter(None, (rule.expression, rule.surroundings)):
            assert not kinds(parser.parse(text)) & {*foreign, "POSSESSIVE_REPEAT"}, text
            bounds = map(int, re.findall(r"\{\d*,?(\d+)\}", text))
            assert max(bounds, default=0) <= 1000, text  # RE2's


def test_rules_say_where_they_are_from() -> None:
    """Each names its sources and a known check, and the licence of the data lies beside it."""
    for rule in load_catalogue():
        for source in rule.source.split():
            assert re.fullmatch(r"leyline|(?:gitleaks|detect-secrets):[a-z0-9_-]+", source)
        assert rule.check in {"", *CHECKS}
        assert bool(rule.pattern) != bool(rule.names)
    licence = Path(catalogue.__file__).with_name("keys") / "LICENSE.gitleaks"
    assert "Copyright (c) 2019 Zachary Rice" in licence.read_text("utf-8")


def test_the_documented_table_is_the_code_s() -> None:
    """Each detector of keys has its row, with as many samples as there are, all found."""
    shown = DOCUMENT.partition(detectors.BEGIN)[2].partition("<!--")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) \| ([\d.]+%) \| (\d+) \|$", shown, re.MULTILINE)
    counts = {kind: sum(sample.kind == kind for sample in SAMPLES) for kind in KEYS}
    assert {kind: int(count.replace(",", "")) for kind, count, *_ in rows} == counts
    assert {found for *_, found, _ in rows} == {"100.0%"}
    assert {alarms for *_, alarms in rows} == {"0"}


def test_recorded_sessions_lose_nothing(traces_dir: Path) -> None:
    """There are no false alarms in what real agents have read and written, as the table says."""
    search = Search(load_detectors(["keys"]))
    found = []
    for text in detectors.texts(traces_dir):
        search.begin()
        found += [text[start:end] for start, end in search.spans(text)]
    assert found == []
