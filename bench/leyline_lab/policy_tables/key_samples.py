"""Random keys in the formats of `key_formats.toml`, each of them in many surroundings."""

from __future__ import annotations

import base64
import json
import random
import re
import string
import tomllib
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

FORMATS = Path(__file__).with_name("key_formats.toml")
_LOWER, _UPPER, _DIGITS = string.ascii_lowercase, string.ascii_uppercase, string.digits
_BASE64 = (_LOWER, _UPPER, _DIGITS, "+/")
_CLASSES: dict[str, tuple[str, ...]] = {
    "an": (_LOWER, _UPPER, _DIGITS),
    "b64": _BASE64,
    "base32": (_UPPER, "234567"),
    "bech": ("QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L",),
    "dig": (_DIGITS,),
    "hex": ("abcdef", _DIGITS),
    "ln": (_LOWER, _DIGITS),
    "pw": (_LOWER, _UPPER, _DIGITS, "$!&/#+"),
    "pw9": (_LOWER, _UPPER, _DIGITS, "!+-"),
    "up": (_UPPER, _DIGITS),
    "url": (_LOWER, _UPPER, _DIGITS, "-_"),
    "word": (_LOWER, _UPPER),
}
"""Characters by class, in sets of which a random text has one each: nearly all real ones do."""
_FIELD = re.compile(r"\{(\w+)(?::([^{}]*))?\}")
_WINDOW = 8


@dataclass(frozen=True, slots=True)
class Sample:
    """A text with a secret of a kind in it.

    Args:
        form: the format and the surroundings, for a report.
        secrets: parts of which no eight characters in a row may be left; a shorter one is whole.
    """

    kind: str
    form: str
    text: str
    secrets: tuple[str, ...]

    def is_left_in(self, text: str) -> bool:
        """Return True if anything of the secret is in ``text``."""
        for secret in self.secrets:
            size = min(_WINDOW, len(secret))
            if any(secret[at : at + size] in text for at in range(len(secret) - size + 1)):
                return True
        return False


class Maker:
    """Random secrets, from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # samples, not secrets
        self._whole: dict[str, Callable[[str], str]] = {
            "der": lambda _: "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC" + self.characters("b64", 400),
            "jwt": lambda _: self._jwt((",", ":"), None),
            "jwt_lines": lambda _: self._jwt((", ", ": "), 2),
            "jwt_spaced": lambda _: self._jwt((", ", ": "), None, " "),
            "pair": lambda _: self._encoded(
                f"{self.characters('ln', 6)}:{self.characters('an', 12)}"
            ),
            "pem": lambda kind: "\n".join(self._pem(f"{kind}PRIVATE KEY")),
            "pem64": lambda kind: self._encoded("\n".join(self._pem(f"{kind}PRIVATE KEY")) + "\n"),
            "pem_escaped": lambda _: "\\n".join(self._pem("PRIVATE KEY")) + "\\n",
            "pem_headless": lambda _: "\n".join(self._pem("RSA PRIVATE KEY")[3:]),
            "pem_numbered": lambda _: _numbered(self._pem("RSA PRIVATE KEY"), 1),
            "pem_numbered_headless": lambda _: _numbered(self._pem("RSA PRIVATE KEY")[4:], 5),
            "pem_tailless": lambda _: "\n".join(self._pem("RSA PRIVATE KEY")[:-3]),
            "pgp": lambda _: "\n".join(self._pgp()),
            "uuid": lambda _: str(uuid.UUID(int=self._random.getrandbits(128), version=4)),
        }

    def filled(self, form: str) -> str:
        """Return the form with random text in its fields."""

        def text(field: re.Match[str]) -> str:
            kind, argument = field.group(1), field.group(2) or ""
            if kind in _CLASSES:
                return self.characters(kind, int(argument))
            return self._whole[kind](argument)

        return _FIELD.sub(text, form)

    def characters(self, kind: str, size: int) -> str:
        """Return ``size`` random characters; the first and the last are no signs."""
        sets = _CLASSES[kind]
        texts = [each for each in sets if each.isalnum()]
        middle = [self._random.choice(each) for each in sets][: max(0, size - 2)]
        middle += self._random.choices("".join(sets), k=max(0, size - 2 - len(middle)))
        self._random.shuffle(middle)
        # A password that begins with a number and a sign may be a port and a path.
        first = texts[: 1 if kind.startswith("pw") else None]
        ends = [self._random.choice(self._random.choice(each)) for each in (first, texts)][:size]
        return "".join([*ends[:1], *middle, *ends[1:]])

    def _encoded(self, text: str) -> str:
        return base64.b64encode(text.encode()).decode()

    def _jwt(self, separators: tuple[str, str], indent: int | None, space: str = "") -> str:
        payload = {"sub": self.characters("an", 20), "iat": self._random.randrange(10**9)}
        parts = [
            json.dumps(each, separators=separators, indent=indent)
            for each in ({"alg": "HS256", "typ": "JWT"}, payload)
        ]
        encoded = [
            base64.urlsafe_b64encode(f"{{{space}{part[1:]}".encode()).decode().rstrip("=")
            for part in parts
        ]
        return ".".join([*encoded, self.characters("url", 43)])

    def _pem(self, label: str) -> list[str]:
        body = self._encoded("".join(self._random.choices(string.printable, k=700)))
        lines = [body[at : at + 64] for at in range(0, len(body), 64)]
        return [f"-----BEGIN {label}-----", *lines, f"-----END {label}-----"]

    def _pgp(self) -> list[str]:
        begin, *body, end = self._pem("PGP PRIVATE KEY BLOCK")
        return [begin, "Comment: none", "", *body, f"={self.characters('b64', 4)}", end]


def _numbered(lines: list[str], first: int) -> str:
    return "\n".join(f"{at:6}\t{line}" for at, line in enumerate(lines, first))


def _in_json(text: str) -> str:
    return json.dumps({"output": text, "code": 0})


PLACES: dict[str, Callable[[str], str]] = {
    "text": lambda text: f"Found it:\n{text}\nWhat now?",
    "JSON": _in_json,
    "JSON in JSON": lambda text: json.dumps({"arguments": _in_json(text)}),
    "log": lambda text: f"2026-01-02T03:04:05Z INFO begin\n{text}\n2026-01-02T03:04:06Z INFO end",
    "diff": lambda text: "\n".join(f"+{line}" for line in text.splitlines()),
    "colours": lambda text: f"\x1b[31m{text}\x1b[0m\n",
}
"""Surroundings of any text."""
TOKENS: dict[str, Callable[[str], str]] = {
    "env": lambda token: f"KEY={token}",
    "ini": lambda token: f"[a]\nkey = {token}\n",
    "YAML": lambda token: f"a:\n  key: {token}\n",
    "JSON member": lambda token: json.dumps({"a": {"key": token}}),
    "export": lambda token: f'export KEY="{token}"',
    "URL": lambda token: f"https://example.org/x?k={quote(token, safe='')}&y=1",
    "header": lambda token: f"< X-Key: {token}\r\n",
    "log line": lambda token: f"2026-01-02T03:04:05Z WARN key={token} refused",
    "arguments": lambda token: json.dumps({"command": json.dumps({"run": f"tool -k '{token}'"})}),
    "colours of names": lambda token: f"\x1b[1mkey\x1b[0m=\x1b[32m{token}\x1b[0m",
    "grep": lambda token: f"a.txt:3:\x1b[01;31m\x1b[K{token[:6]}\x1b[m\x1b[K{token[6:]}",
}
"""Surroundings of a token."""


def _camel(name: str) -> str:
    return "".join(each.capitalize() for each in name.split("_"))


NAMED: dict[str, Callable[[str, str], str]] = {
    "env": lambda name, value: f"{name.upper()}={value}",
    "env, quoted": lambda name, value: f"{name.upper()}='{value}'",
    "ini": lambda name, value: f"[a]\n{name.lower()} = {value}\n",
    "YAML": lambda name, value: f"a:\n  {name.lower()}: {value}\n",
    "YAML of Kubernetes": lambda name, value: f"- name: {name.upper()}\n  value: {value}\n",
    "JSON": lambda name, value: json.dumps({_camel(name): value}),
    "JSON of a container": lambda name, value: json.dumps([{"name": name, "value": value}]),
    "export": lambda name, value: f'export {name.upper()}="{value}"',
    "URL": lambda name, value: f"https://e.org/?{name.lower()}={quote(value, safe='')}&y=1",
    "header": lambda name, value: f"{name.replace('_', '-')}: {value}\r\n",
    "log line": lambda name, value: f"2026-01-02T03:04:05Z WARN {name.lower()}={value} refused",
    "command": lambda name, value: f"tool --{name.lower().replace('_', '-')} {value} run",
    "Python": lambda name, value: f'os.environ["{name}"] = "{value}"',
    "arguments": lambda name, value: json.dumps({"c": json.dumps({name.lower(): value})}),
    "colours": lambda name, value: f"\x1b[36m{name}\x1b[0m=\x1b[32m{value}\x1b[0m",
}
"""Surroundings of a value that is known by its name."""


def samples(seed: int) -> Iterator[Sample]:
    """Yield a random sample of every format in each of its surroundings."""
    maker = Maker(seed)
    for kind, forms in tomllib.loads(FORMATS.read_text("utf-8")).items():
        yield from _of_kind(kind, forms, maker)


def _of_kind(kind: str, forms: dict[str, Any], maker: Maker) -> Iterator[Sample]:
    for form in forms.get("tokens", ()):
        lines = form.startswith(("{pem", "{pgp"))
        for place, around in (PLACES if lines else {**PLACES, **TOKENS}).items():
            token = maker.filled(form)
            yield Sample(kind, f"{form} in {place}", around(token), _parts(token))
    for form in forms.get("places", ()):
        for place, around in PLACES.items():
            text = maker.filled(form)
            secret = text.partition("«")[2].partition("»")[0]
            plain = text.replace("«", "").replace("»", "")
            yield Sample(kind, f"{form} in {place}", around(plain), _parts(secret))
    for name, form in forms.get("named", {}).items():
        for place, assigned in NAMED.items():
            value = maker.filled(form)
            yield Sample(kind, f"{name}, {form} in {place}", assigned(name, value), _parts(value))


def _parts(secret: str) -> tuple[str, ...]:
    """Return the parts of a secret that nobody may read; not the lines around a private key."""
    lines = re.split(r"\n|\\n|\t", secret)
    if len(lines) == 1:
        return (secret,)
    return tuple(line for line in lines if len(line) >= _WINDOW and "-----" not in line)
