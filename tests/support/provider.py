"""An identity provider over HTTP: its discovery, its keys, and tokens that it signs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from leyline_lab.stand_ins.serving import serving

AUDIENCE = "leyline"

Private = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


class Provider:
    """A provider whose keys and faults a test chooses; an ASGI application."""

    def __init__(self) -> None:
        self.origin = ""
        self.keys: dict[str, tuple[str, Private]] = {}
        """Algorithm and private key by key id: those that are published."""
        self.looks = 0
        self.status = 200
        self.body: bytes | None = None
        """In place of the keys."""
        self.name: str | None = None
        """In place of the issuer in the discovery document."""
        self.date: str | None = None
        """Header with its time."""

    def add(self, key_id: str, algorithm: str = "RS256") -> Private:
        """Publish a new key."""
        private: Private
        if algorithm.startswith(("RS", "PS")):
            private = rsa.generate_private_key(65537, 2048)
        elif algorithm == "EdDSA":
            private = ed25519.Ed25519PrivateKey.generate()
        else:
            private = ec.generate_private_key(ec.SECP256R1())
        self.keys[key_id] = algorithm, private
        return private

    def token(self, key_id: str = "k1", *, key: Private | None = None, **claims: Any) -> str:
        """A token; claims of None are left out."""
        algorithm, private = self.keys.get(key_id, ("RS256", key))
        now = time.time()
        whole = {"iss": self.origin, "aud": AUDIENCE, "iat": now, "exp": now + 300, "sub": "me"}
        kept = {name: value for name, value in {**whole, **claims}.items() if value is not None}
        assert private is not None
        return jwt.encode(kept, key or private, algorithm, headers={"kid": key_id})

    def document(self) -> dict[str, Any]:
        """The published keys."""
        found = []
        for key_id, (algorithm, private) in self.keys.items():
            kind = jwt.get_algorithm_by_name(algorithm)
            public = json.loads(kind.to_jwk(private.public_key()))
            found.append({**public, "kid": key_id, "use": "sig", "alg": algorithm})
        return {"keys": found}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        path = Request(scope).url.path
        answer: Response
        if path.endswith("/openid-configuration"):
            named = {"issuer": self.name or self.origin, "jwks_uri": f"{self.origin}/keys"}
            answer = JSONResponse(named)
        else:
            self.looks += 1
            answer = JSONResponse(self.document(), status_code=self.status)
            if self.body is not None:
                answer = Response(self.body)
        if self.date is not None:
            answer.headers["date"] = self.date
        await answer(scope, receive, send)


@contextmanager
def provider() -> Iterator[Provider]:
    """A provider with one key, ``k1``."""
    app = Provider()
    app.add("k1")
    with serving(app) as origin:
        app.origin = origin
        yield app
