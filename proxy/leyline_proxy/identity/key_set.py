"""An identity provider's public keys: read ahead, read again when unknown ones appear, and bounded.

The last good keys stay in use while the provider can't be reached, for a limited time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Protocol

import httpx
import jwt
import structlog

from ..bounded_body import BodyTooLongError, bounded_body
from ..telemetry.logging import frames_of
from .errors import KeysGoneError

log = structlog.get_logger("leyline.identity")

DISCOVERY = "/.well-known/openid-configuration"
_MAX_BYTES = 256 * 1024
_MAX_KEYS = 64
_TIMEOUT_S = 5.0
_SOONEST_S = 10.0
"""Shortest time between two looks: tokens with made-up keys cost the provider no more."""
_RETRY_S = 10.0
_SKEW_S = 60.0
"""Difference of clocks that is worth a warning."""


class KeySetError(Exception):
    """The keys can't be read; the message is for operators and callers."""


@dataclass(frozen=True, slots=True)
class PublicKeys:
    """Keys by their id; one without an id has an empty one."""

    keys: Mapping[str, jwt.PyJWK]
    skew_s: float | None = None
    """The provider's clock less ours; None if it gave no time."""


class Fetch(Protocol):
    """Reads the keys; raises KeySetError."""

    async def __call__(self) -> PublicKeys: ...


def read_keys(document: Mapping[str, Any]) -> Mapping[str, jwt.PyJWK]:
    """Return the usable keys of a JWKS document: public ones, for signatures.

    Raises:
        KeySetError: there is none, or there are too many.
    """
    listed = document.get("keys")
    if not isinstance(listed, list) or len(listed) > _MAX_KEYS:
        raise KeySetError(f"no list of at most {_MAX_KEYS} keys")
    found: dict[str, jwt.PyJWK] = {}
    for each in listed:
        if not isinstance(each, dict) or each.get("kty") == "oct" or each.get("use") == "enc":
            continue
        try:
            key = jwt.PyJWK.from_dict(each)
        except (jwt.PyJWTError, ValueError, TypeError, KeyError):
            continue  # of a kind that isn't known here
        if isinstance(key.key_id, str | None):
            found[key.key_id or ""] = key
    if not found:
        raise KeySetError("none of the keys can be used")
    return found


class HttpKeys:
    """Reads keys from the provider.

    Args:
        issuer: as in tokens.
        url: of the keys; None asks the provider for it.
    """

    def __init__(
        self, issuer: str, url: str | None, *, now: Callable[[], float] = time.time
    ) -> None:
        self._issuer = issuer
        self._url = url
        self._now = now

    async def __call__(self) -> PublicKeys:
        """Return the provider's keys.

        Raises:
            KeySetError: they can't be read.
        """
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, follow_redirects=False) as http:
            url = self._url or await self._discovered(http)
            document, skew_s = await self._json(http, url)
        return PublicKeys(read_keys(document), skew_s)

    async def _discovered(self, http: httpx.AsyncClient) -> str:
        document, _ = await self._json(http, self._issuer.rstrip("/") + DISCOVERY)
        if document.get("issuer") != self._issuer:
            raise KeySetError("the provider calls itself by another name than oidc_issuer")
        url = document.get("jwks_uri")
        secure = isinstance(url, str) and (
            url.startswith("https://") or self._issuer.startswith("http://")
        )
        if not isinstance(url, str) or not secure:
            raise KeySetError("the provider names no https:// jwks_uri")
        return url

    async def _json(
        self, http: httpx.AsyncClient, url: str
    ) -> tuple[Mapping[str, Any], float | None]:
        try:
            async with http.stream("GET", url) as answer:
                if answer.status_code != httpx.codes.OK:
                    raise KeySetError(f"{url} answers {answer.status_code}")
                raw = await bounded_body(answer, _MAX_BYTES)
                document = httpx.Response(200, content=raw).json()
        except BodyTooLongError as error:
            raise KeySetError(f"{url} gives more than {_MAX_BYTES} bytes") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise KeySetError(f"{url} can't be reached ({type(error).__name__})") from error
        except (ValueError, RecursionError) as error:
            raise KeySetError(f"{url} gives no JSON") from error
        if not isinstance(document, dict):
            raise KeySetError(f"{url} gives no object")
        return document, self._skew(next(iter(answer.headers.get_list("date")[-1:]), None))

    def _skew(self, date: str | None) -> float | None:
        try:
            return parsedate_to_datetime(date or "").timestamp() - self._now()
        except (ValueError, TypeError):
            return None


class KeySet:
    """The provider's keys, as far as they are known.

    Args:
        fetch: reads them.
        max_age_s: seconds for which they are used after the last good look.
        fetched: called after each look, with True if it was good.
        clock: returns seconds that never go back.
    """

    def __init__(
        self,
        fetch: Fetch,
        *,
        refresh_s: float,
        max_age_s: float,
        fetched: Callable[[bool], object] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fetch = fetch
        self._refresh_s = refresh_s
        self._max_age_s = max_age_s
        self._fetched = fetched
        self._clock = clock
        self._keys: Mapping[str, jwt.PyJWK] = {}
        self._good_at: float | None = None
        self._looked_at: float | None = None
        self._looking: asyncio.Task[None] | None = None
        self.problem: str | None = "they were not read yet"
        """The reason that the last look failed; None if it didn't."""
        self.skew_s: float | None = None
        """The provider's clock less ours, at the last look."""

    @property
    def age_s(self) -> float | None:
        """Seconds since the last good look; None before the first."""
        return None if self._good_at is None else self._clock() - self._good_at

    @property
    def usable(self) -> bool:
        """True if there are keys that aren't too old."""
        age_s = self.age_s
        return age_s is not None and age_s <= self._max_age_s

    async def run(self) -> None:
        """Look at the keys at intervals, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._refresh_s if self.problem is None else _RETRY_S)

    async def find(self, key_id: str) -> jwt.PyJWK | None:
        """Return a key, after another look if it is unknown and one is due; None for none.

        Raises:
            KeysGoneError: no keys may be used.
        """
        found = self._held().get(key_id) if self.usable else None
        if found is None and (self._looking is not None or self._due()):
            await self.look()
        if not self.usable:
            raise KeysGoneError(self.problem or "they are too old")
        return found or self._held().get(key_id)

    def knows(self, key_id: str) -> bool:
        """Return True if a key may be used without another look."""
        return self.usable and key_id in self._held()

    async def look(self) -> None:
        """Read the keys; callers at the same time share one look."""
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        looking = self._looking
        try:
            # A caller that leaves doesn't end the others' look.
            await asyncio.shield(looking)
        finally:
            if looking.done():
                self._looking = None

    async def _look(self) -> None:
        self._looked_at = self._clock()
        try:
            found = await self._fetch()
        except KeySetError as error:
            self._failed(str(error))
            return
        except Exception as error:
            # A document that nobody foresaw must not end the looks, nor leave old keys in force.
            kind = type(error).__name__
            problem = f"they can't be read ({kind})"
            if problem != self.problem:
                log.error("identity_keys_failed", error=kind, frames=frames_of(error))
            self._failed(problem)
            return
        if found.skew_s is not None and abs(found.skew_s) > _SKEW_S:
            log.warning("clocks_differ", provider_ahead_s=round(found.skew_s))
        self._keys, self.skew_s, self.problem = found.keys, found.skew_s, None
        self._good_at = self._clock()
        self._fetched(True)

    def _failed(self, problem: str) -> None:
        if self.problem != problem:
            log.warning("identity_keys_unavailable", problem=problem)
        self.problem = problem
        self._fetched(False)

    def _held(self) -> Mapping[str, jwt.PyJWK]:
        return self._keys

    def _due(self) -> bool:
        return self._looked_at is None or self._clock() - self._looked_at >= _SOONEST_S
