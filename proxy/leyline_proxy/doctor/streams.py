"""Check of the audit log's Redis: whether lines can be added to its stream."""

from __future__ import annotations

from typing import Any

from redis.exceptions import ResponseError

from ..audit.stream import FIELD
from ..sessions.redis.link import client_of
from .findings import Finding, fail, ok
from .stores import FAILURES, StoreNeeds, fix_of, patient, place_of, unreachable

_NO_ID = "0-0"
"""Invalid id of an entry: the command checks all permissions and limits, and adds nothing."""
_ADDS_NOTHING = "must be greater than 0-0"


async def examine_stream(needs: StoreNeeds, limit_s: float) -> list[Finding]:
    """Check that the proxy's user may write there. The stream isn't changed."""
    try:
        async with client_of(patient(needs.options, limit_s)) as client:
            refusal = await _refusal(client, needs.prefix)
    except FAILURES as error:
        return [unreachable(needs, error)]
    place = place_of(needs.options.url)
    return [ok(f"{needs.name}.reachable", f"Redis at {place} answers"), _verdict(needs, refusal)]


async def _refusal(client: Any, stream: str) -> ResponseError | None:
    async with client.pipeline(transaction=True) as pipe:
        pipe.xadd(stream, {FIELD: ""}, id=_NO_ID)
        try:
            await pipe.execute()
        except ResponseError as error:
            return None if _ADDS_NOTHING in str(error) else error
    return None


def _verdict(needs: StoreNeeds, refusal: ResponseError | None) -> Finding:
    name, stream = f"{needs.name}.write", needs.prefix
    if refusal is None:
        return ok(name, f"entries can be added to {stream}")
    fix = fix_of(refusal, f"Let the user XADD to the key {stream}, with MULTI and EXEC")
    return fail(name, f"can't add entries to {stream} ({refusal}): only the file gets them", fix)
