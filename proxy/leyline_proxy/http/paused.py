"""The answer that ends with a compaction."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import orjson
from starlette.responses import Response

from ..apis.events import encoded
from ..model.fields import OPTIONS_FIELD
from ..request.wire import add_members
from .api import ApiCall
from .compacting import Written
from .sse import DONE


async def paused_answer(call: ApiCall, written: Written, *, stream: bool) -> Response | bytes:
    """Return the answer in the client's API, whole or as the bytes of its events.

    It is an answer without words; the usage is that of the summary.
    """
    members = written.account.members
    members[OPTIONS_FIELD]["compaction"] = written.report.document()
    usage = _usage(written)
    choice = {"index": 0, "finish_reason": "stop", "logprobs": None}
    said = {"role": "assistant", "content": ""}
    if not stream:
        answer = {**_head(written, "chat.completion"), "choices": [{**choice, "message": said}]}
        shown = call.whole(orjson.dumps({**answer, "usage": usage}), answer)
        added = call.members(written.account, usage)
        body = add_members(shown, {name: msgspec.json.encode(v) for name, v in added.items()})
        await call.settled(written.turn, body)
        return Response(body, media_type="application/json")
    chunk = {**_head(written, "chat.completion.chunk"), "choices": [{**choice, "delta": said}]}
    chunk |= {"usage": usage, **members}
    events = call.events(written.turn)
    if events is None:
        return b"data: %b\n\ndata: %b\n\n" % (msgspec.json.encode(chunk), DONE)
    told = encoded(events.feed(chunk)) + encoded(events.close())
    await call.settled(written.turn, None)
    return told


def _head(written: Written, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{written.turn.message_id}",
        "object": kind,
        "created": int(time.time()),
        "model": written.turn.request.model,
    }


def _usage(written: Written) -> dict[str, Any]:
    counted = written.report.usage or {}
    prompt, output = counted.get("prompt_tokens", 0), counted.get("completion_tokens", 0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": counted.get("cached_tokens", 0)},
    }
