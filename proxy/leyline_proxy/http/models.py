"""``GET /v1/models``: the models of all engines, as one list."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import orjson
from starlette.responses import Response

from ..errors import ProxyError
from ..upstream.client import read
from ..upstream.headers import MODELS, RawHeaders, downstream_headers, headers_of_route
from ..upstream.pool import Names, ReplicaPool
from ..upstream.replica import Replica
from .refusal import refusal_response


async def model_list(pool: ReplicaPool, allowed: Names | None, headers: RawHeaders) -> Response:
    """Return the engine's own answer, or one list of the models of several engines.

    The list has each model once, with the entry of the first engine that names it.

    Raises:
        ProxyError: no engine can be reached.
    """
    known = pool.open_to(allowed)
    # An engine that is known to be down would only cost a wait.
    replicas = [each for each in known if each.status.up] or known
    if len(replicas) == 1:
        return await _ask(replicas[0], headers)
    answers = await asyncio.gather(
        *(_ask(each, headers) for each in replicas), return_exceptions=True
    )
    responses = [answer for answer in answers if isinstance(answer, Response)]
    listed = [answer for answer in responses if answer.status_code == httpx.codes.OK]
    if listed:
        found: dict[str, Any] = {}
        for answer in listed:
            found |= {name: each for name, each in _models(bytes(answer.body)) if name not in found}
        document = {"object": "list", "data": list(found.values())}
        return Response(orjson.dumps(document), media_type="application/json")
    if responses:
        return responses[0]
    raise next(answer for answer in answers if isinstance(answer, BaseException))


async def listed_model(
    pool: ReplicaPool, allowed: Names | None, headers: RawHeaders, name: str
) -> Any:
    """Return a model's entry in the list; None if it has none.

    Raises:
        ProxyError: no engine can be reached.
    """
    listed = await model_list(pool, allowed, headers)
    if listed.status_code != httpx.codes.OK:
        return None
    return dict(_models(bytes(listed.body))).get(name)


async def _ask(replica: Replica, headers: RawHeaders) -> Response:
    try:
        async with replica.client.open(
            "GET",
            MODELS,
            headers=headers_of_route(headers, MODELS),
            timeout_s=replica.client.small_timeout_s,
        ) as upstream:
            body = await read(upstream)
    except ProxyError:
        replica.handshake.report_failure()
        raise
    if upstream.status_code != httpx.codes.OK:
        return refusal_response(upstream, body, {})
    return Response(body, headers=downstream_headers(upstream.headers))


def _models(body: bytes) -> list[tuple[str, Any]]:
    """Return the ids and entries of a list; none if the body is no list."""
    try:
        return [(str(entry["id"]), entry) for entry in orjson.loads(body)["data"]]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return []
