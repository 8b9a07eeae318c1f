"""The user's engine, asked before anything is started."""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
import msgspec

from leyline_engine.contract import CAPABILITY_PATH, Capability, judge

from ..errors import EndpointError, PlanError

_TIMEOUT_S = 10.0
_KEY = "LEYLINE_UPSTREAM_API_KEY"


@dataclass(frozen=True, slots=True)
class Engine:
    """Facts of an engine that decide which arms it can serve."""

    name: str
    """Engine and version, or ``unknown``."""
    splices: bool
    isolates: bool
    """True if it keeps the KV of tenants apart."""
    obstacle: str = ""
    """Reason why it doesn't splice."""


def base_of(url: str) -> str:
    """Return an engine's base URL, without ``/v1``.

    Raises:
        PlanError: it is no HTTP URL.
    """
    base = url.rstrip("/").removesuffix("/v1").rstrip("/")
    if urlsplit(base).scheme not in ("http", "https") or not urlsplit(base).hostname:
        raise PlanError("--upstream takes the engine's address, such as http://gpu1:30000")
    return base


def ask_engine(base: str, model: str) -> Engine:
    """Return the facts of the engine at a base URL.

    Raises:
        EndpointError: nobody answers, the key is wrong, or it doesn't serve the model.
    """
    key = os.environ.get(_KEY)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    place = _shown(base)
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=_TIMEOUT_S) as client:
            listed = client.get("/v1/models")
            offered = client.get(CAPABILITY_PATH)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EndpointError(f"no engine answers at {place}: {type(error).__name__}") from error
    if listed.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise EndpointError(f"{place} needs a key: set {_KEY}")
    if listed.status_code != httpx.codes.OK:
        raise EndpointError(f"{place}/v1/models answers {listed.status_code}")
    served = _models(listed.content, place)
    if model not in served:
        raise EndpointError(f"{place} serves no model {model!r}; it serves {', '.join(served)}")
    if offered.status_code != httpx.codes.OK:
        return Engine("unknown", False, False, "it runs without the Leyline plugin")
    try:
        facts = msgspec.json.decode(offered.content, type=Capability)
    except msgspec.DecodeError as error:
        raise EndpointError(f"{place} returns no valid capability document") from error
    mismatch = judge(facts)
    return Engine(
        facts.engine_label,
        facts.splices and mismatch is None,
        facts.isolates,
        facts.unsupported_reason if mismatch is None else str(mismatch),
    )


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def _models(content: bytes, place: str) -> tuple[str, ...]:
    try:
        return tuple(each.id for each in msgspec.json.decode(content, type=_Models).data)
    except msgspec.DecodeError as error:
        raise EndpointError(f"{place} is no OpenAI-compatible server: /v1/models") from error


def _shown(base: str) -> str:
    """Return an address without credentials."""
    parts = urlsplit(base)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
