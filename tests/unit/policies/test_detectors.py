"""The named detectors of redact: what each finds, and what it lets pass.

Keys are put together here, or the searches of code hosts would take them for real ones.
"""

from __future__ import annotations

import base64
import json
import sys
import time

import pytest

from leyline_policies import SpecError, load_pipeline
from leyline_policies.builtin.detectors import KEYS, PII, load_detectors
from leyline_policies.builtin.search import Search

LETTERS = "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF3hI6kL9n"
UPPER = "Q7R2S9T4U1V8W3X6"
HEX = "0123456789abcdef" * 2


def _pem(kind: str = "RSA ", newline: str = "\n") -> str:
    body = base64.b64encode(bytes(range(96))).decode()
    lines = [f"-----BEGIN {kind}PRIVATE KEY-----", body[:64], body[64:]]
    return newline.join([*lines, f"-----END {kind}PRIVATE KEY-----"])


def _jwt() -> str:
    parts = (json.dumps(each).encode() for each in ({"alg": "HS256"}, {"sub": "1234567"}))
    return ".".join([*(base64.urlsafe_b64encode(p).decode().rstrip("=") for p in parts), LETTERS])


FOUND: dict[str, list[str]] = {
    "anthropic_key": ["sk-ant-" + "api03-" + LETTERS],
    "aws_key": ["AKIA" + UPPER, "ASIA" + UPPER],
    "credit_card": [
        "4111 1111 1111 1111",
        "4111-1111-1111-1111",
        "378282246310005",
        "3782 822463 10005",
        "5555555555554444",
        "6011000990139424",
        "2223003122003222",
    ],
    "discord_token": ["M" + LETTERS[:24] + "." + LETTERS[:6] + "." + LETTERS[:27]],
    "email": ["jane.doe+x@mail.example.co.uk", "a_b@example.org", "ümit@example.org"],
    "github_token": ["ghp_" + LETTERS[:36], "github_pat_" + LETTERS],
    "gitlab_token": ["glpat-" + LETTERS[:20], "glrt-" + LETTERS],
    "google_api_key": ["AIza" + LETTERS[:35], "GOCSPX-" + LETTERS[:28]],
    "huggingface_token": ["hf_" + LETTERS[:34]],
    "iban": ["DE89 3704 0044 0532 0130 00", "GB82WEST12345698765432", "BE68 5390 0754 7034"],
    "ip_address": [
        "203.0.113.7",
        "10.0.0.1",
        "2001:db8::8a2e:370:7334",
        "fe80::1",
        "::ffff:192.0.2.1",
    ],
    "jwt": [_jwt()],
    "mailchimp_key": [HEX + "-us12"],
    "openai_key": [
        "sk-" + LETTERS[:20] + "T3BlbkFJ" + LETTERS[:20],
        "sk-proj-" + LETTERS + "T3BlbkFJ" + LETTERS + "_x-y",
    ],
    "phone": ["+49 30 901820", "+1 650-253-0000", "+44 20 7031 3000"],
    "private_key": [_pem(), _pem(""), _pem("OPENSSH ", "\r\n"), _pem("EC ", "\\n")],
    "pypi_token": ["pypi-" + "AgEIcHlwaS5vcmc" + LETTERS * 2],
    "sendgrid_key": ["SG." + LETTERS[:22] + "." + (LETTERS * 2)[:43]],
    "slack_token": ["xoxb-" + "123456789012-" + LETTERS, "xapp-1-" + LETTERS],
    "square_secret": ["sq0csp-" + (LETTERS * 2)[:43]],
    "stripe_key": ["sk_live_" + LETTERS, "rk_test_" + LETTERS, "whsec_" + LETTERS],
    "telegram_token": ["123456789:" + LETTERS[:35]],
    "twilio_key": ["AC" + HEX, "SK" + HEX],
    "us_ssn": ["536-90-4399", "536 90 4399"],
}
WITHIN: dict[str, list[tuple[str, str]]] = {
    "aws_key": [("aws_secret_key = '{}'", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYz1234567aa")],
    "azure_storage_key": [("AccountKey={};B=c", "x" * 86 + "==")],
    "basic_auth": [("https://me:{}@example.org/x", "hunter2")],
    "iban": [("to {} EUR", "BE68 5390 0754 7034"), ("{} AND MORE", "DE89370400440532013000")],
    "npm_token": [("//registry.npmjs.org/:_authToken={}", "npm_" + LETTERS[:36])],
    "phone": [("call {} today", "+49 30 901820")],
    "private_key": [("{}\n\nWhat is this?", _pem().rpartition("\n")[0])],
}
PASSED: dict[str, list[str]] = {
    "anthropic_key": ["sk-ant-", "task-ant-hill"],
    "aws_key": ["AKIA", "AKIAabcdefghijklmnop", "aws_secret_key = ''"],
    "azure_storage_key": ["AccountKey=x"],
    "basic_auth": ["https://example.org:8080/a@b", "me:you@example.org"],
    "credit_card": [
        "4111 1111 1111 1112",
        "1732212345678",
        "0000 0000 0000 0000",
        "3.4111111111111111",
        "41111111111111111111111",
    ],
    "discord_token": ["Mary had a little lamb.", "a.b.c"],
    "email": [
        "git@github.com:x/y.git",
        "a@b",
        "@decorator",
        "22-@pytest.mark",
        "x@@example.org",
        "1@2.3",
    ],
    "github_token": ["ghp_short", "github_pat_"],
    "gitlab_token": ["glpat-short"],
    "google_api_key": ["AIza", "AIzaShort"],
    "huggingface_token": ["hf_hub", "hf_transfer"],
    "iban": [
        "DE89 3704 0044 0532 0130 01",
        "RS232 SERIAL CABLE ADAPTER",
        "XX00 1234 5678 9012 3456",
    ],
    "ip_address": [
        "127.0.0.1",
        "::1",
        "::",
        "0.0.0.0",  # noqa: S104
        "1.2.3",
        "[2::4]",
        "1.2.3.4.5",
        "300.1.1.1",
        "10:11:12",
    ],
    "jwt": ["eyJhbGciOi", "a.b.c"],
    "mailchimp_key": [HEX, "contact-us1"],
    "npm_token": ["//registry.npmjs.org/"],
    "openai_key": ["sk-short", "sk-learn is fine", "risk-averse-and-very-long-words-in-a-row-here"],
    "phone": ["+1 555", "2024-01-01 12:33:44", "+ 12345", "1+1234567", "(650) 253-0000"],
    "private_key": ["-----BEGIN PUBLIC KEY-----\nAA\n-----END PUBLIC KEY-----", "a PRIVATE KEY"],
    "pypi_token": ["pypi-AgEIcHlwaS5vcmc"],
    "sendgrid_key": ["SG.a.b"],
    "slack_token": ["xoxb-", "xapp-1-"],
    "square_secret": ["sq0csp-x"],
    "stripe_key": ["sk_live_", "whsec_x"],
    "telegram_token": ["12:34", "123456789:short"],
    "twilio_key": ["AC", "SKILL", HEX],
    "us_ssn": ["000-12-3456", "666-12-3456", "123-45-67890", "2024-11-2101", "536-904399"],
}


def _redacted(detector: str, text: str, region: str | None = None) -> str:
    return Search(load_detectors([detector], region)).redacted(text, "█")


def test_every_detector_has_examples() -> None:
    """Each detector of personal data is shown to find something and to let something pass; those of
    keys have random samples besides (`test_key_catalogue.py`)."""
    assert {*FOUND, *WITHIN} >= {*PII}
    assert PASSED.keys() >= {*PII}
    assert {*FOUND, *WITHIN, *PASSED} <= {*KEYS, *PII}


@pytest.mark.parametrize(
    ("detector", "secret"), [(name, each) for name, all_ in FOUND.items() for each in all_]
)
@pytest.mark.parametrize("around", ["{}", "a: {}, b", '{{"a": "{}"}}', "\n{}\n"])
def test_the_whole_secret_goes(detector: str, secret: str, around: str) -> None:
    """Nothing of what was found is left, and nothing else goes."""
    assert _redacted(detector, around.format(secret)) == around.format("█")


@pytest.mark.parametrize(
    ("detector", "text", "secret"),
    [(name, *each) for name, all_ in WITHIN.items() for each in all_],
)
def test_what_is_around_a_secret_stays(detector: str, text: str, secret: str) -> None:
    """If the shape takes in more than the secret, only the secret goes."""
    assert _redacted(detector, text.format(secret)) == text.format("█")


@pytest.mark.parametrize(
    ("detector", "text"), [(name, each) for name, all_ in PASSED.items() for each in all_]
)
def test_what_only_looks_alike_passes(detector: str, text: str) -> None:
    """Wrong check digits, prefixes alone and ordinary words are not taken for secrets."""
    assert _redacted(detector, f"see {text} there") == f"see {text} there"


def test_colours_hide_no_key_and_stay_around_it() -> None:
    """A key is found through a terminal's colours; of those after it, none goes."""
    key = "ghp_" + LETTERS[:36]
    text = f"\x1b[1ma\x1b[0m=\x1b[32m{key[:6]}\x1b[m\x1b[K{key[6:]}\x1b[0m \x1b[1mb%20c\x1b[0m"
    assert _redacted("github_token", text) == "\x1b[1ma\x1b[0m=█\x1b[0m \x1b[1mb%20c\x1b[0m"


def test_a_region_makes_national_numbers_known() -> None:
    """Without it only numbers with a country code are telephone numbers."""
    assert _redacted("phone", "call (650) 253-0000 now", "US") == "call █ now"
    assert _redacted("phone", "call 030 901820 now", "DE") == "call █ now"
    with pytest.raises(SpecError, match="phone_region=XX"):
        load_pipeline("redact:detectors=[phone],phone_region=XX")


def test_groups_are_all_of_a_kind() -> None:
    """``keys`` and ``pii`` include their detectors, each loaded once."""
    assert len(load_detectors(["keys", "aws_key"])) == len(load_detectors(KEYS))
    assert len(load_detectors(["pii", "keys"])) == len(load_detectors([*PII, *KEYS]))


@pytest.mark.parametrize(
    ("detector", "module", "package"),
    [
        ("credit_card", "stdnum.luhn", "python-stdnum"),
        ("phone", "phonenumbers", "phonenumbers"),
    ],
)
def test_a_missing_package_is_named(
    detector: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says which package the detector needs."""
    monkeypatch.setitem(sys.modules, module, None)
    told = rf"{detector} needs the package {package}, .*pip install {package}$"
    with pytest.raises(SpecError, match=told):
        load_pipeline(f"redact:detectors=[{detector}]")


@pytest.mark.parametrize(
    "text",
    [
        "sk-" * 20_000,
        "a" * 60_000,
        "1 " * 30_000,
        "a@" * 30_000,
        "-----BEGIN RSA PRIVATE KEY-----\n" * 2_000,
    ],
)
def test_detectors_are_fast_on_hostile_text(text: str) -> None:
    """All of them together, on 60 KB made of beginnings, stay within the budget of a turn."""
    begun = time.thread_time()
    Search(load_detectors(["keys", "pii"])).redacted(text, "█")
    assert time.thread_time() - begun < 2.0
