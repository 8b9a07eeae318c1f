"""A trial of the store of evicted texts, as a tenant that no caller can be."""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from secrets import token_hex

from ..model.parts import StoredPart
from ..parts.limits import PartStoreError
from ..parts.store import PartStore
from ..settings import Settings
from ..settings.sessions import MEMORY
from ..wiring.recall import build_part_store, recalls
from .findings import Finding, fail, ok, skip

_NAME = "recall-store"
_TENANT = "\0doctor"
_FIX = (
    "Check that the place of recall_store is there, and that the proxy may read, write and delete "
    "in it; recall_store_timeout_s waits longer."
)


async def examine_recall(settings: Settings) -> list[Finding]:
    """Put, recall and forget a text. Only what the store remembers of the forget remains."""
    if not recalls(settings):
        return [skip(_NAME, "recall is off (recall)")]
    if settings.recall_store.get_secret_value() == MEMORY:
        return [skip(_NAME, "evicted texts are in this process's memory (recall_store)")]
    try:
        store = build_part_store(settings)
    except ValueError as error:
        return [fail(_NAME, str(error), "Install it, or choose another recall_store.")]
    try:
        return [await _tried(store)]
    finally:
        with suppress(Exception):  # the finding is known
            await store.aclose()


async def _tried(store: PartStore) -> Finding:
    owner, text = (_TENANT, token_hex(8)), token_hex(8)
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    part = StoredPart(
        address=f"sha256:{digest}",
        text=text,
        role="tool",
        tokens=1,
        policy="doctor",
        turn="doctor",
        index=0,
        created=time.time(),
    )
    try:
        await store.put(owner, [part])
        found = await store.get(owner, [part.address])
        if found.parts != {part.address: part}:
            return fail(_NAME, "a text that was put wasn't there afterwards", _FIX)
        await store.forget(owner, turn="", demands=0)
        found = await store.get(owner, [part.address])
        _, survivors = await store.held(owner, 1)
        if found.parts or not found.forgotten or survivors:
            return fail(_NAME, "a text that was forgotten could still be recalled", _FIX)
        await store.delete(owner)
    except PartStoreError as error:
        return fail(_NAME, f"evicted texts can't be kept: {error}", _FIX)
    return ok(_NAME, f"put, recalled and forgot a text ({store.name})")
