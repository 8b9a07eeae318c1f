"""Check of the audit log's Redis: whether lines can be added to its stream."""

from __future__ import annotations

from redis.exceptions import NoPermissionError, ReadOnlyError, ResponseError

from ..audit.stream import FIELD
from .findings import Finding, fail, ok
from .stores import FAILURES, StoreNeeds, connected, place_of, unreachable

_NO_ID = "0-0"
"""Invalid id of an entry: the command checks all permissions and limits, and adds nothing."""
_ADDS_NOTHING = "must be greater than 0-0"


async def examine_stream(needs: StoreNeeds, limit_s: float) -> list[Finding]:
    """Check that the proxy's user may write there. The stream isn't changed."""
    try:
        async with connected(needs.options, limit_s) as client:
            refusal = await _refusal(client, needs.prefix)
    except FAILURES as error:
        return [unreachable(needs, error)]
    place = place_of(needs.options.url)
    return [ok(f"{needs.name}.reachable", f"Redis at {place} answers"), _verdict(needs, refusal)]


async def _refusal(client: object, stream: str) -> ResponseError | None:
    add = client.execute_command  # type: ignore[attr-defined]
    try:
        await add("XADD", stream, _NO_ID, FIELD, "")
    except ResponseError as error:
        return None if _ADDS_NOTHING in str(error) else error
    return None


def _verdict(needs: StoreNeeds, refusal: ResponseError | None) -> Finding:
    name, stream = f"{needs.name}.write", needs.prefix
    if refusal is None:
        return ok(name, f"entries can be added to {stream}")
    if isinstance(refusal, NoPermissionError):
        fix = f"Let the user XADD to the key {stream}, with MULTI and EXEC (ACL SETUSER)."
    elif isinstance(refusal, ReadOnlyError):
        fix = "Give the URL of the primary: this is a replica."
    else:
        fix = "Check Redis's log: Redis or its disk may be full."
    kind = type(refusal).__name__
    return fail(name, f"can't add entries to {stream} ({kind}): only the file gets them", fix)
